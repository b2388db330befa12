"""Matplotlib's SVG as an element of a page: in the page's colours, small, and with ids that can be made unique."""

import re
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

COLOR = "#c0000{}"  # what a plot is drawn with; the page has a CSS variable for each
RULE, INK, PAPER = "#0a0a0a", "#000000", "#fefefe"
_REFERENCE = re.compile(r"#([\w.-]+)")
_NUMBER = re.compile(r"(-?\d+\.\d)\d+")
_DROPPED = ("metadata", "style")  # of the document; a style would be the whole page's


def in_page(text: str) -> str:
    """An `<svg>` of role img whose name and description are the elements PLOT-title and PLOT-desc.

    `text`: what matplotlib wrote, drawn with the colours above. Ids that are used begin with `PLOT-`; others are left
    out, and so are fonts, which are the page's.
    """
    root = ElementTree.fromstring(text)
    values = [value for element in root.iter() for value in element.attrib.values()]
    used: dict[str, str] = {}  # the short ids
    for name in (name for value in values for name in _REFERENCE.findall(value)):
        used.setdefault(name, str(len(used)))
    body = "".join(_written(element, used) for element in root)
    return f'<svg viewBox="{root.attrib["viewBox"]}" role="img" aria-labelledby="PLOT-title PLOT-desc">{body}</svg>'


def _written(element: Element, used: dict[str, str]) -> str:
    tag = _local(element.tag)
    if tag in _DROPPED:
        return ""
    body = "".join(_written(child, used) for child in element)
    said = " ".join(_attributes(element, used))
    if tag in ("g", "defs") and not body:
        return ""
    if tag == "g" and not said:
        return body
    text = _escaped((element.text or "").strip())
    opened = f"<{tag}{' ' if said else ''}{said}"
    return f"{opened}>{text}{body}</{tag}>" if text or body else f"{opened}/>"


def _attributes(element: Element, used: dict[str, str]) -> Iterator[str]:
    for key, value in element.attrib.items():
        name = _local(key)
        if name == "id":
            if value in used:
                yield f'id="PLOT-{used[value]}"'
            continue
        if name == "style":
            value = _style(value)
        elif name == "transform":
            value = re.sub(r"rotate\(-?0 [^)]*\)", "", value).strip()
        elif name == "d":
            value = re.sub(r" *([A-Za-z]) *", r"\1", " ".join(value.split()))
        else:
            value = _REFERENCE.sub(lambda found: f"#PLOT-{used[found[1]]}", value)
        if value:
            short = value if name == "style" else _short(value)  # a style has shares, as of opacity
            yield f'{name}="{_escaped(short)}"'


def _style(text: str) -> str:
    """Without fonts, and with the page's colours."""
    pairs = [pair.strip() for pair in text.split(";")]
    pairs = [re.sub(r"^font: ([\d.]+px) .*", r"font-size: \1", pair, flags=re.DOTALL) for pair in pairs]
    pairs = [pair for pair in pairs if pair and not pair.startswith(("font-family", "font-size: 10px"))]
    style = re.sub(COLOR.format(r"(\d)"), r"var(--series-\1)", "; ".join(pairs))
    return style.replace(RULE, "var(--rule)").replace(INK, "currentColor").replace(PAPER, "var(--paper)")


def _short(numbers: str) -> str:
    """Numbers with a digit behind the point, which is a pixel's tenth, and none where that is 0."""
    return re.sub(r"\.0(?!\d)", "", _NUMBER.sub(r"\1", numbers))


def _local(name: str) -> str:
    """A name without its namespace: HTML knows those of SVG."""
    return name.rpartition("}")[2]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
