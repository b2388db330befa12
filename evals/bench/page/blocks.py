"""What a page is made of, before it is HTML or Markdown. Texts are plain: the renderers escape them."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows; the others are numbers unless `texts`."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: bool = False


@dataclass(frozen=True)
class Plot:
    """A picture with a text alternative and a table of the numbers that it draws.

    `svg`: an SVG element whose ids begin with `PLOT-`; the renderer makes these unique on the page.
    """

    title: str
    description: str
    svg: str
    numbers: Table


@dataclass(frozen=True)
class Notes:
    """Sentences under a title, as a list."""

    title: str
    items: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Names with their values; folded away where `folded`."""

    title: str
    items: Sequence[tuple[str, str]]
    folded: bool = True


Block = Table | Plot | Notes | Facts


@dataclass(frozen=True)
class Entry:
    """One result: its title and its blocks, in order."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """All results of one evaluation. `about`: what it measures; `anchor`: its place on the page; `closing`: blocks on
    all of them together."""

    anchor: str
    title: str
    about: str
    entries: Sequence[Entry]
    closing: Sequence[Block] = ()


@dataclass(frozen=True)
class Headline:
    """A figure of the verdict: the value large, what it is, and what it is of."""

    value: str
    name: str
    of: str


@dataclass(frozen=True)
class Page:
    """The whole report. `verdict`: one sentence; `overview`: a row for each result."""

    title: str
    verdict: str
    headlines: Sequence[Headline]
    overview: Sequence[Block]
    sections: Sequence[Section] = field(default_factory=tuple)
