"""The pages of the site that stand outside docs/: README as its home, and the project's other Markdown files.

A hook of mkdocs.yml. Links between files of the repository become links between pages; knows nothing of their text.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "data/tiny_target/README.md": "tiny_target.md",
}
LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each of PAGES."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        text = f"# Licence\n\n```\n{text}```\n" if source == "LICENSE" else text
        files.append(File.generated(config, page, content=as_page(text, PurePosixPath(source).parent)))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Pages of docs/ name README and its neighbours by their place in the repository."""
    return as_page(markdown, PurePosixPath("docs"))


def as_page(text: str, folder: PurePosixPath) -> str:
    """Markdown of a file in `folder` of the repository, its links as they are within the site."""
    return LINK.sub(lambda link: link[1] + _target(link[2], folder), text)


def _target(link: str, folder: PurePosixPath) -> str:
    place = _within(folder / link)
    return PAGES.get(place, place.removeprefix("docs/") if place.startswith("docs/") else link)


def _within(path: PurePosixPath) -> str:
    """A path from the repository's root on, without `..`."""
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)
