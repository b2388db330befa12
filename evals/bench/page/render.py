"""A page as one HTML file that loads nothing, and as Markdown. The template escapes all texts."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eagle_train.artifacts.markdown import code, plain
from eagle_train.artifacts.markdown import table as markdown_table
from evals.bench.page.blocks import Block, Facts, Notes, Page, Plot, Table

FOLDER = Path(__file__).parent


def html(page: Page) -> str:
    """One file: styles and plots are within, and nothing is loaded from anywhere."""
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.tests["table"] = lambda block: isinstance(block, Table)
    environment.tests["plot"] = lambda block: isinstance(block, Plot)
    environment.tests["notes"] = lambda block: isinstance(block, Notes)
    environment.filters["svg"] = _svg
    environment.filters["breakable"] = _breakable
    style = Markup((FOLDER / "page.css").read_text("utf-8"))
    return _with_classes(environment.get_template("page.html.jinja").render(page=page, style=style, numbers=Numbers()))


class Numbers:
    """Counts what needs an id of its own on the page."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """1, 2, ..."""
        self._last += 1
        return self._last


def _svg(plot: Plot, number: int) -> Markup:
    """A plot's SVG with ids of its own, and its title and description within."""
    prefix = f"plot-{number}-"
    alternatives = Markup('<title id="{0}title">{1}</title><desc id="{0}desc">{2}</desc>')
    told = alternatives.format(prefix, plot.title, plot.description)
    start = plot.svg.index(">") + 1
    return Markup(plot.svg[:start].replace("PLOT-", prefix)) + told + Markup(plot.svg[start:].replace("PLOT-", prefix))


def _breakable(name: str) -> Markup:
    """A name that may go on in another line behind a / or _: files' names have no blanks, and a table would be wider
    than the page."""
    return Markup("<wbr>").join(re.split("(?<=[/_])", name))


def _with_classes(text: str) -> str:
    """The page with classes in place of plots' styles, of which there are few that repeat: a quarter less of it."""
    names: dict[str, str] = {}

    def plot(found: re.Match[str]) -> str:
        return re.sub(
            ' style="([^"]*)"', lambda one: f' class="{names.setdefault(one[1], f"p{len(names)}")}"', found[0]
        )

    text = re.sub("<svg .*?</svg>", plot, text, flags=re.DOTALL)
    rules = "\n".join(f".{name} {{ {style}; }}" for style, name in names.items())
    return text.replace("</style>", f"{rules}\n</style>", 1)


def markdown(page: Page) -> str:
    """The same as Markdown: of plots, what they show and the numbers that they draw."""
    parts = [f"# {plain(page.title)}", plain(page.verdict)]
    if page.headlines:
        parts.append(
            "\n".join(f"- {plain(each.value)} {plain(each.name)}: {plain(each.of)}" for each in page.headlines)
        )
    parts += [_block(block) for block in page.overview]
    for section in page.sections:
        parts += [f"## {plain(section.title)}", plain(section.about)]
        for entry in section.entries:
            parts += [f"### {plain(entry.title)}", *(_block(block) for block in entry.blocks)]
        if section.closing:
            parts += ["### Beside published figures", *(_block(block) for block in section.closing)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Plot):
        return f"{plain(block.description)}\n\n{_block(block.numbers)}"
    if isinstance(block, Notes):
        return "\n".join([f"**{plain(block.title)}**", "", *(f"- {plain(item)}" for item in block.items)])
    if isinstance(block, Facts):
        rows = [[plain(name), code(value)] for name, value in block.items]
        return f"**{plain(block.title)}**\n\n{markdown_table(['', ''], rows)}"
    rows = [[plain(cell) for cell in row] for row in block.rows]
    rule = "---" if block.texts else "---:"
    return f"**{plain(block.caption)}**\n\n{markdown_table([plain(name) for name in block.header], rows, rule=rule)}"
