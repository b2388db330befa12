"""What a checkpoint's config.json and generation_config.json cannot say, told before transformers fails on it.

Sizes are models/shapes.py's. Knows nothing of weights or tokenizers.
"""

import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from eagle_train.errors import check, shown

FLOATS = ("auto", "float64", "float32", "float16", "bfloat16")  # of a config.json


def check_values(values: Mapping[str, Any], hint: str, place: str) -> None:
    """Raise UserError for a config.json that transformers could not read, or would fail on in its own words.

    `hint`: what to do where its model is code of its own that is not trusted.
    """
    kind, own = values.get("model_type"), "auto_map" in values
    check(isinstance(kind, str), f"{place}: config.json has model_type={shown(kind)}; give a causal language model's")
    check(kind in CONFIG_MAPPING or not (own and hint), f"{place}: its model is Python code of its own{hint}")
    check(
        kind in CONFIG_MAPPING or own,
        f"{place}: transformers {transformers.__version__} knows no model_type={kind}; install a newer one "
        "(`pip install -U transformers`) if the model is newer than that",
    )
    names = values.get("architectures")
    listed = [names] if isinstance(names, str) else names or []
    check(
        isinstance(listed, list) and all(isinstance(name, str) for name in listed),
        f"{place}: config.json has architectures={shown(names)}; it must be a list with the name of a class",
    )
    inner = [each for name, each in values.items() if name in ("text_config", "llm_config") and isinstance(each, dict)]
    for name, value in ((name, each.get(name)) for each in (values, *inner) for name in ("dtype", "torch_dtype")):
        floats = [value] if isinstance(value, str | int) else []  # it may be by sub-model
        check(
            all(each in FLOATS for each in floats),
            f"{place}: config.json has {name}={shown(value)}; it must be one of {', '.join(FLOATS)}",
        )


def misfit(said: str) -> str:
    """What a config's own checks say of a field, without the types' Python names."""
    found = re.match(r"Field '([^']+)' (?:with value (.*?) doesn't match|expected .*?\(value: (.*)\)$)", said)
    if found is None:
        return said
    kinds = dict.fromkeys(re.findall(r"expected (?:an? )?(\w+)", said))
    wanted = " or ".join("null" if kind == "NoneType" else kind for kind in kinds)
    return f"{found[1]}={found[2] or found[3]}; it must be {wanted}"


def check_generation(values: Mapping[str, Any], place: str) -> None:
    """Raise UserError for a generation_config.json whose answers could not end: transformers takes anything there."""
    given = values.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    check(
        all(isinstance(each, int) and not isinstance(each, bool) for each in ids),
        f"{place}: generation_config.json has eos_token_id={shown(given)}; it must be a token's number, or several",
    )
