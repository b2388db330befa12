"""A target whose hidden states lie on disk, as `eagle-cache` wrote them: embedding and LM head, and no layers.

DESIGN section 3.4. Shapes: B rows, T tokens of a packed row, L layers, H hidden.
"""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from eagle_train.errors import UserError, check, foreign, shown
from eagle_train.models.directory import folder_of
from eagle_train.models.head import LMHead
from eagle_train.models.loading import DTYPES, TargetConfig, load_config, load_tokenizer
from eagle_train.models.state_files import (
    HIDDEN,
    HIDDEN_SCALES,
    LAYER_SCALES,
    LAYERS,
    Header,
    Place,
    StateFiles,
    decoded,
    key_of,
    read_header,
)
from eagle_train.models.target import Identity, Target, TargetEnds
from eagle_train.ops.tensor_files import tensors_of, write_tensors

_ENDS = "ends.safetensors"
_EMBEDDING, _WEIGHT, _BIAS = "embedding", "lm_head.weight", "lm_head.bias"
# What of a checkpoint says how texts become tokens, and which class it is of.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "*.py",
)
_SHOWN = 12  # tokens of a document by which a message names it


@dataclass
class CachedTarget(TargetEnds):
    """What training needs of a target, with its states from disk. Nothing of it can be run."""

    text_config: Any
    files: StateFiles
    tokenizer: Any
    embedding: torch.Tensor
    lm_head: LMHead
    name: str = field(init=False)
    identity: Identity = field(init=False)

    def __post_init__(self) -> None:
        self.identity = Identity(**self.files.header.target)
        self.name = self.identity.name

    @property
    def config(self) -> Any:
        return self.text_config

    def embedding_scale(self) -> float:
        return self.files.header.embedding_scale

    def stored_states(
        self, tokens: torch.Tensor, supervised: torch.Tensor, lengths: list[list[int]], layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor], UserError | None]:
        """The final hidden states [B, T, H] of packed rows and the outputs [B, T, H] of these layers, in the target's
        dtype on its device; 0 in padding, and where none is kept.

        `tokens` int64 and `supervised` bool [B, T] are the host's; `lengths`: of each row's documents. A document that
        is not in the cache, or is damaged, is 0, and the error of the first is returned: this rank alone may meet it,
        and others wait for its part of the step.
        """
        header, layout = self.files.header, self.files.header.layout
        widths, pinned = layout.widths, self.device.type == "cuda"
        buffers = {
            name: torch.zeros(*tokens.shape, width, dtype=torch.uint8, pin_memory=pinned)
            for name, width in widths.items()
            if width
        }
        fault = None
        for row, start, end in documents_of(supervised, lengths):
            wanted = supervised[row, start:end]
            try:
                states = self.files.read(self._place_of(tokens[row, start:end], wanted))
            except UserError as error:
                fault = fault or error
                continue
            for name, content in states.items():
                into = buffers[name].numpy()[row, start:end]
                into[wanted.numpy() if header.supervised_only and name in (HIDDEN, HIDDEN_SCALES) else ...] = content
        sent = {name: each.to(self.device, non_blocking=True) for name, each in buffers.items()}
        scales = {name: sent[name].view(torch.float32) for name in (HIDDEN_SCALES, LAYER_SCALES) if name in sent}
        of_hidden = scales[HIDDEN_SCALES].squeeze(-1) if scales else None
        hidden = decoded(sent[HIDDEN].view(layout.stored), of_hidden, layout)
        if not layers:
            return hidden, [], fault
        outputs = sent[LAYERS].view(layout.stored).unflatten(-1, (layout.layers, layout.hidden))
        places = [header.layers.index(layer) for layer in layers]
        of_layers = [scales[LAYER_SCALES][..., place] if scales else None for place in places]
        decoded_layers = [
            decoded(outputs[..., place, :], each, layout) for place, each in zip(places, of_layers, strict=True)
        ]
        return hidden, decoded_layers, fault

    def check_has(self, tokens: torch.Tensor, supervised: torch.Tensor, lengths: list[list[int]]) -> None:
        """Raise UserError where a document of these packed rows, on the host, is not in the cache. Reads no states."""
        for row, start, end in documents_of(supervised, lengths):
            self._place_of(tokens[row, start:end], supervised[row, start:end])

    def _place_of(self, tokens: torch.Tensor, supervised: torch.Tensor) -> Place:
        """Where a document lies. Raises UserError where it is not there."""
        header = self.files.header
        place = self.files.find(key_of(tokens, supervised if header.supervised_only else None))
        if place is not None:
            return place
        first = tokens[:_SHOWN].tolist()
        text = first if self.tokenizer is None else self.tokenizer.decode(first)
        raise UserError(
            f"{self.files.place}: has no states of a document of {len(tokens)} tokens that begins {shown(text)}; run "
            "eagle-cache with this run's data, data.row_tokens, train.steps and train.eval_batches, or train with the "
            "target itself"
        )


def documents_of(supervised: torch.Tensor, lengths: list[list[int]]) -> list[tuple[int, int, int]]:
    """Row, start and end of each document in packed rows; padding is none. `supervised` bool [B, T]: every document
    has a supervised slot, and padding has none."""
    found = []
    for row, of_row in enumerate(lengths):
        start = 0
        for length in of_row:
            if bool(supervised[row, start : start + length].any()):
                found.append((row, start, start + length))
            start += length
    return found


def check_cached(config: TargetConfig, target_quant: str, placement: str) -> Header:
    """The header of the cache that `target=cached` names. Raises UserError where a run with this `train.target_quant`
    and `parallel.target` cannot use it; what a draft asks for is `check_holds`'s."""
    place = f"target.path={config.path}"
    header = read_header(Path(config.path), place)
    wanted = DTYPES[config.dtype]
    check(
        wanted in (None, header.computed),
        f"target.dtype={config.dtype}: {place} holds states of a target in {header.dtype}; leave target.dtype out",
    )
    check(
        target_quant == header.target_quant,
        f"train.target_quant={target_quant}: {place} was written with {header.target_quant}; give the same",
    )
    check(
        placement == "replicated",
        f"parallel.target={placement}: {place} has no layers to divide; use parallel.target=replicated",
    )
    return header


def check_holds(header: Header, layers: tuple[int, ...], reads_hidden: bool, kind: str, place: str) -> None:
    """Raise UserError where a cache does not hold what a draft of this kind wants: the outputs of `layers`, and if it
    `reads_hidden`, the final hidden state at every slot. `place` begins the message."""
    missing = [layer for layer in layers if layer not in header.layers]
    held = f"the outputs of layers {header.layers}" if header.layers else "final hidden states alone"
    check(
        not missing,
        f"{place}: holds {held}, counted from 0, and draft={kind} wants those of {list(layers)}; run eagle-cache with "
        "this draft",
    )
    check(
        not (header.supervised_only and reads_hidden),
        f"{place}: was written with supervised_only=true, and draft={kind} is fed the final hidden state at every "
        "slot; run eagle-cache with supervised_only=false",
    )


def check_reaches(header: Header, rows: int | None, length: str, place: str) -> None:
    """Raise UserError where a cache holds a part of the data, and a run reads more than that: so many packed `rows`,
    None where it ends by the clock. `length`: the setting that says so."""
    check(
        header.rows is None or (rows is not None and rows <= header.rows),
        f"{length}: {place} holds the documents of {header.rows} packed rows of the data, and this run reads "
        f"{'as many as it has time for' if rows is None else rows}; run eagle-cache with {length}",
    )


def load_cached(config: TargetConfig, device: torch.device | str) -> CachedTarget:
    """The target of a cache, on `device`. Raises UserError where files are missing or damaged."""
    place, folder = f"target.path={config.path}", Path(config.path)
    header = read_header(folder, place)
    text_config = load_config(config).get_text_config()
    with foreign(f"{place}: {_ENDS} cannot be read; write the cache again"):
        ends = {name: each.to(device) for name, each in tensors_of(folder / _ENDS).items()}
    embedding = ends[_EMBEDDING]
    lm_head = LMHead(ends.get(_WEIGHT, embedding), ends.get(_BIAS), header.scale, header.softcap)
    files = StateFiles(folder, header, place)
    return CachedTarget(text_config, files, load_tokenizer(config), embedding, lm_head)


def write_ends(target: Target, folder: Path) -> None:
    """Write the target's embedding and LM head, once where they are one."""
    head, embedding = target.lm_head, target.embedding
    ends = {_EMBEDDING: embedding, _BIAS: head.bias}
    if head.weight.shape != embedding.shape or not torch.equal(head.weight, embedding):
        ends[_WEIGHT] = head.weight
    there = {name: each.detach().cpu().contiguous() for name, each in ends.items() if each is not None}
    write_tensors(there, folder / _ENDS)


def ends_bytes(vocabulary: int, hidden: int, tied: bool, itemsize: int) -> int:
    """Bytes of what `write_ends` writes, biases left out."""
    return vocabulary * hidden * itemsize * (1 if tied else 2)


def small_files(path: str) -> list[Path]:
    """What a target's directory, or the hub's cache of its name, has of _SMALL_FILES."""
    source = folder_of(path)
    found = {file for pattern in _SMALL_FILES for file in (source.glob(pattern) if source else ())}
    return sorted(file for file in found if file.is_file())


def copy_small_files(config: TargetConfig, folder: Path) -> None:
    """Copy what the target's directory holds beside weights: its config, tokenizer and chat template, the one that is
    asked for among them."""
    source = folder_of(config.path)
    assert source is not None, "its target is loaded"
    for file in small_files(config.path):
        into = folder / file.relative_to(source)
        into.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, into)
    if config.chat_template is not None:
        tokenizer = load_tokenizer(config)
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")


def with_dtype(config: TargetConfig, header: Header) -> TargetConfig:
    """`target.dtype` as the cache has it."""
    return replace(config, dtype=header.dtype)
