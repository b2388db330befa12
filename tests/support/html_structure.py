"""A page of HTML as its elements, read by html.parser: what a page for everyone must keep to can be asked of it."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
COLOR = re.compile(r"--([\w-]+): (#[0-9a-f]{6})")


@dataclass
class Element:
    """An element with what is within; `text`: its own and that of all elements within."""

    tag: str
    attributes: dict[str, str]
    children: list["Element"] = field(default_factory=list)
    text: str = ""

    def all(self, *tags: str) -> list["Element"]:
        """Those of these tags within, in the order of the page; without tags all."""
        found = []
        for child in self.children:
            found += [child] if not tags or child.tag in tags else []
            found += child.all(*tags)
        return found


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = [Element("page", {})]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        closed = self.open.pop()
        assert closed.tag == tag, f"</{tag}> closes <{closed.tag}>, line {self.getpos()[0]}"

    def handle_data(self, data):
        for element in self.open:
            element.text += data


def page(text: str) -> Element:
    """The page's elements. Raises AssertionError for one that is not closed, or closed elsewhere."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"not closed: {[each.tag for each in reader.open[1:]]}"
    return reader.open[0]


def schemes(text: str) -> dict[str, dict[str, str]]:
    """The colours of the light and of the dark scheme, by the names of their variables."""
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    return {"light": dict(COLOR.findall(light)), "dark": dict(COLOR.findall(dark))}


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours #rrggbb, by WCAG 2."""
    lights = sorted((_luminance(one), _luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
