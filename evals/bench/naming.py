"""Names for the entries of a list, by which results and reports call them. Knows nothing of what these are."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from eagle_train.errors import check

T = TypeVar("T")


def by_name(entries: Sequence[T], short: Callable[[T], str], field: str) -> dict[str, T]:
    """Entries by their short names. Where several have the same one, a text is called by all of it, and what is no text
    has a number behind its name.

    Raises UserError, naming `field`, where two would still be called the same, as a text that is there twice.
    """
    names, found = [short(each) for each in entries], dict[str, T]()
    for place, each in enumerate(entries):
        name, alike = names[place], names.count(names[place])
        if alike > 1:
            name = each if isinstance(each, str) else f"{name}_{names[: place + 1].count(name)}"
        check(name not in found, f"{field}: {name} is there twice; give a mapping, {{NAME: ..., OTHER: ...}}")
        found[name] = each
    return found
