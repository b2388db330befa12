"""The licence of a draft, as its model card names it. Knows nothing of weights.

A draft is trained on what its target computes, so the target's terms are the safe assumption: the target's licence is
taken over where its own card names one. Nothing is guessed; without a card the draft's licence is left out, and the
card says so.
"""

import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from eagle_train.errors import check

_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.-]*")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)^---$", re.MULTILINE | re.DOTALL)
_LICENSE = re.compile(r"^license: *[\"']?([^\s\"']+)", re.MULTILINE)


def check_license(license: str | None) -> None:
    """Raise UserError for what is no identifier of the hub."""
    known = license is None or _IDENTIFIER.fullmatch(license) is not None
    check(known, f"license={license}: must be an identifier of the hub, apache-2.0 or llama3.1, for example")


def license_of_target(name: str) -> str | None:
    """What the card of a target names: a directory, or a hub id whose card is in the cache. None where none does.

    `other` is left out as well: it stands for a text that the draft's own card would have to name.
    """
    card = Path(name) / "README.md"
    if not card.is_file() and _HUB_ID.fullmatch(name):
        cached = try_to_load_from_cache(name, "README.md")
        card = Path(cached) if isinstance(cached, str) else card
    front = _FRONT_MATTER.match(card.read_text("utf-8", errors="replace")) if card.is_file() else None
    found = _LICENSE.search(front[1]) if front else None
    stated = found[1] if found and _IDENTIFIER.fullmatch(found[1]) else None
    return None if stated == "other" else stated
