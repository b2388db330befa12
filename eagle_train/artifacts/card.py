"""The model card (README.md) of an exported draft: how to serve it, what it achieves, its target, its training.

A pure function of the artifact. Knows nothing of the draft's own files.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_train.artifacts.format import Artifact
from eagle_train.artifacts.layouts import layout_of
from eagle_train.artifacts.markdown import code, plain, table
from eagle_train.drafts.layouts import TOKEN_MAP, TOKENS
from eagle_train.errors import UserError, check

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DRAFT, _TARGET = "/path/to/draft", "/path/to/target"  # for a reader to replace
_LOOPING = 0.1  # share of answers that end in a loop, from which on a card says so
_SAMPLING = (  # keys of an evaluation that change what is accepted, and their values that change nothing
    ("min_p", 0),
    ("logit_bias", None),
    ("repetition_penalty", 1),
    ("presence_penalty", 0),
    ("frequency_penalty", 0),
    ("min_tokens", 0),
)
# Where an engine turns by longrope's factors for long texts once it may serve such, and the option that prevents it.
_VLLMS_LONGROPE = ("vLLM", "at every length", "--max-model-len")
_LONGROPE = {
    "vllm": _VLLMS_LONGROPE,
    "speculators": _VLLMS_LONGROPE,
    "sglang": ("SGLang", "in each batch with such a text", "--context-length"),
}
_NATIVE = """\
```bash
eagle-generate target={target} draft={here} prompt="..."
python -m evals.mt_bench target={target} draft={here} questions=/path/to/questions.jsonl
```

The second runs in a clone of eagle_train, which has `evals`."""


def card(about: Artifact, tensors: Mapping[str, torch.Tensor], hub_id: str | None = None) -> str:
    """The card of an artifact whose file holds `tensors`, and whose place on the hub is `hub_id`."""
    draft, target = about.draft, about.target
    own = layout_of(about.layout, draft)
    here = hub_id if hub_id and own and own.reads_hub else _DRAFT
    read = _target_of(target.name, reads_hub=own is None or own.reads_hub)
    token_map = "" if draft.vocabulary is None else f" \\\n    --speculative-token-map {here}/{TOKEN_MAP}"
    # Without the option SGLang would quantise the draft as it does the target.
    unquantised = " --speculative-draft-model-quantization unquant" if about.quant.scheme == "none" else ""
    window = "" if draft.window is None else f" \\\n    --speculative-draft-window-size {draft.window - 1}"
    told = {
        "target": read,
        "named": target.name,
        "here": here,
        "heads": draft.levels,
        "blocks": draft.num_layers,
        "levels": draft.levels,
    }
    if own is not None and own.vllm:
        told["vllm"] = json.dumps(own.speculative_config(here, draft.levels or TOKENS))
    told |= {"token_map": token_map, "unquantised": unquantised, "window": window}
    serve = (_NATIVE if own is None else own.serves).format(**told)
    stands_for = {_DRAFT: "the directory with these files", _TARGET: f"that of the target, {code(target.name)}"}
    parts = [
        _front_matter(about),
        f"# {draft.titled()} for {plain(target.name)}",
        f"{draft.described()} tokens for {code(target.name)}, which verifies them: "
        "the output stays the target's own, in fewer of its calls. "
        f"Layout: {about.layout}. Weights: {_weights(about)}.",
        "## Serve it",
        serve,
        *(f"`{place}` stands for {what}." for place, what in stands_for.items() if place in serve),
        *(f"Note: {each}." for each in caveats(about)),
        "## What it is worth",
        _worth(about.evaluations, read),
        "## What it was made for",
        _listing(
            {
                "target": f"{target.name}, weights' fingerprint {target.fingerprint}",
                "target's shape": f"{target.num_layers} layers, hidden size {target.hidden_size}, "
                f"vocabulary {target.vocab_size}",
                "draft's vocabulary": draft.vocab_size or "the target's",
                "draft's trained weights": f"fingerprint {about.source}",
                **({} if draft.at_once else {"rotary positions": json.dumps(draft.rope_parameters, sort_keys=True)}),
                **{name.replace("_", " "): text for name, text in about.conventions.items()},
            }
        ),
        "## How it was made",
        _listing(_flat(about.training)) if about.training else "Not recorded.",
        *([] if about.license else ["## Licence", _unlicensed(about)]),
        "## Size on disk",
        table(["part", "tensors", "MB"], _sizes(tensors)),
    ]
    return "\n\n".join(parts) + "\n"


def _target_of(name: str, reads_hub: bool) -> str:
    """A target in a shell's commands that run in any directory; `name` leads to it from where the draft was trained.
    `reads_hub`: whether they take names of the hub."""
    leads_there = Path(name).is_absolute() or (reads_hub and _is_hub(name))
    return shlex.quote(name) if leads_there else _TARGET


def _is_hub(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def caveats(about: Artifact) -> list[str]:
    """What a draft loses in serving engines, if anything: without the first token's slot, where it was trained with
    one, and by frequencies that change with the longest context."""
    trained, found = about.training.get("first_token", about.draft.first_token), []
    if trained != about.draft.first_token:
        found.append(
            "serving engines begin the draft at the second token, and this one was trained with a slot for the first "
            f"(draft.first_token={trained}), so they accept fewer tokens than our own engine; train with "
            "draft.first_token=skip, or continue some steps from this draft (train.init_from)"
        )
    rope = about.draft.rope_parameters
    if rope.get("rope_type") == "longrope" and about.layout in _LONGROPE and not about.draft.at_once:
        length, (engine, where, option) = rope["original_max_position_embeddings"], _LONGROPE[about.layout]
        found.append(
            f"where {engine} may serve more than {length} tokens, it takes longrope's factors for long texts {where}, "
            f"and this draft was trained with those for short ones; serve with {option} {length} or less"
        )
    return found


def _front_matter(about: Artifact) -> str:
    """The hub's metadata."""
    lines = ["library_name: eagle_train", f"tags: [{about.draft.kind}, speculative-decoding, draft-model]"]
    if _is_hub(about.target.name):
        lines.append(f"base_model: {about.target.name}")
    if about.license is not None:
        lines.append(f"license: {about.license}")
    return "\n".join(["---", *lines, "---"])


def _unlicensed(about: Artifact) -> str:
    """What somebody who exports or receives a draft without a licence should do."""
    return (
        "Not stated. A draft is trained on what its target computes, so the target's licence may bind it: read that of "
        f"{code(about.target.name)}, and export again with `license=ID`."
    )


def _weights(about: Artifact) -> str:
    """The weights' precision in words."""
    if about.quant.scheme == "none":
        return about.dtype
    how = {"int4": "INT4 in groups of 128", "fp8": "FP8 (E4M3), a scale for each output and each token"}
    what = {"ffn": "the feed-forward", "all_linear": "all linear modules"}[about.quant.scope]
    rounded = {"nearest": "rounded to nearest", "gptq": "rounded with error feedback on the target's states"}
    return f"{what} in {how[about.quant.scheme]}, {rounded[about.rounding]}; the rest {about.dtype}"


def _worth(evaluations: Sequence[Mapping[str, Any]], target: str) -> str:
    """The table of evaluations, a row for each measurement."""
    if not evaluations:
        return (
            f"Not measured yet: in a clone of eagle_train, `python -m evals.quantisation target={target} draft=DIR "
            "questions=FILE`, DIR an export without quantisation and FILE your questions, then export again with "
            "`evaluations=[outputs/quantisation/results.json]`."
        )
    header = ["weights", "tree", "temperature", "prompts", "TPC", "acceptance by depth", "measured on", "note"]
    rows = [
        [
            "not quantised" if found["weights"] == "none" else plain(found["weights"]),
            found["tree"],
            f"{found['temperature']:g}",
            f"{found['prompts']} of {plain(found['questions'])}",
            f"{found['tpc']:.3f}",
            " ".join(f"{share:.2f}" for share in found["acceptance_per_depth"]),
            plain(found["hardware"]),
            plain("; ".join(found["notes"])),
        ]
        for found in evaluations
    ]
    note = (
        "TPC, tokens per call: tokens committed per target call, its own token included. Acceptance by depth: of the "
        "rounds that draft to depth 1, 2, ..., the share that accepts down to it."
    )
    return f"{table(header, rows)}\n\n{note}"


def read_evaluations(paths: Iterable[str], source: str) -> list[dict[str, Any]]:
    """The figures in results.json files of `evals.mt_bench` or `evals.quantisation` for this draft.

    `source`: the fingerprint of its trained weights. Raises UserError for other files and other drafts.
    """
    found = []
    for path in paths:
        try:
            results = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"evaluations={path}: cannot be read: {error}") from error
        wanted = f"evaluations={path}: give a results.json of evals.mt_bench or evals.quantisation"
        check(isinstance(results, dict) and isinstance(results.get("draft_source"), str), wanted)
        measured = results["draft_source"]
        check(
            measured == source,
            f"evaluations={path}: measured another draft, with fingerprint {measured}, not {source}",
        )
        check(_are_ours(results), wanted)
        for weights, figures in _by_weights(results).items():
            own = {name: results[name] for name in ("tree", "temperature", "prompts")}
            own |= {name: figures[name] for name in ("tpc", "acceptance_per_depth")}
            own |= {"questions": _asked(results), "hardware": _hardware(results), "notes": _notes(results, figures)}
            found.append({"weights": weights, **own})
    return found


def _asked(results: Mapping[str, Any]) -> str | None:
    """A suite by its title, else the file of the questions by its name; None where the results have neither."""
    suite, questions = results.get("suite"), results["config"].get("questions")
    if isinstance(suite, Mapping) and isinstance(suite.get("title"), str):
        return suite["title"]
    return Path(questions).name if isinstance(questions, str) else None


def _hardware(results: Mapping[str, Any]) -> str:
    """The processor and our version; a TPC hardly depends on them, and a reader compares what is alike."""
    made = results.get("provenance") or {}
    place, version = made.get("gpu") or made.get("cpu"), made.get("eagle-train")
    return ", ".join([str(place or "not written"), *([f"eagle-train {version}"] if version else [])])


def _notes(results: Mapping[str, Any], figures: Mapping[str, Any]) -> list[str]:
    """What makes a row another one than its columns say."""
    config, suite, found = results["config"], results.get("suite") or {}, []
    if results.get("lossy"):
        found.append("LOSSY: relaxed acceptance, answers need not be the target's own")
    if config.get("context_lengths"):
        found.append(f"contexts of {', '.join(map(str, config['context_lengths']))} tokens")
    if suite.get("thinking") is not None:
        found.append(f"thinking {'on' if suite['thinking'] else 'off'}")
    drafting = (config.get("engine") or {}).get("drafting", "greedy")
    if drafting != "greedy":
        found.append(f"{drafting.replace('_', ' ')} drafts")
    found += [f"{name.replace('_', ' ')} {config[name]}" for name, off in _SAMPLING if config.get(name, off) != off]
    looping = figures.get("looping_answers", results.get("looping_answers")) or 0.0
    if looping > _LOOPING:
        found.append(f"{100 * looping:.0f} % of the answers end in a loop, which is easy to draft")
    return found


def _by_weights(results: Mapping[str, Any]) -> dict[str, Any]:
    """The figures by quantisation scheme: evals.quantisation measures several, evals.mt_bench one."""
    return results.get("schemes", {results.get("quant"): results})


def _are_ours(results: Mapping[str, Any]) -> bool:
    """Whether the results have all that a card shows; other evaluations write results of a draft too."""
    kinds = {"tree": str, "temperature": int | float, "prompts": int, "config": Mapping}
    if not all(isinstance(results.get(key), kind) for key, kind in kinds.items()):
        return False
    schemes = _by_weights(results)
    return _asked(results) is not None and all(
        isinstance(weights, str)
        and isinstance(figures, dict)
        and isinstance(figures.get("tpc"), int | float)
        and isinstance(figures.get("acceptance_per_depth"), list)
        and all(isinstance(share, int | float) for share in figures["acceptance_per_depth"])
        for weights, figures in schemes.items()
    )


def _sizes(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Table rows (part, number of tensors, MB): one for each part of the draft, and the total."""
    parts = {"feed-forward": ".mlp.", "attention": ".self_attn.", "fusion (fc)": "fc.", "LM head": "lm_head."}
    groups: dict[str, list[torch.Tensor]] = {part: [] for part in (*parts, "norms")}
    for name, tensor in tensors.items():
        part = next((part for part, mark in parts.items() if mark in f".{name}" or name.startswith(mark)), "norms")
        groups[part].append(tensor)
    groups["all"] = list(tensors.values())
    return [[part, str(len(own)), f"{sum(x.nbytes for x in own) / 1e6:.3f}"] for part, own in groups.items()]


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


def _listing(values: Mapping[str, Any]) -> str:
    return "\n".join(f"- {key}: {_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    """A value as YAML writes it, floats with six digits."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return plain(str(value))
