"""A cache read again: each document against its key and its checksum, and some computed anew by the target."""

from pathlib import Path

import torch

from eagle_train.caching.options import Run
from eagle_train.distributed import ALONE
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.models.cached_target import with_dtype
from eagle_train.models.loading import load_target
from eagle_train.models.state_files import (
    HIDDEN,
    HIDDEN_SCALES,
    LAYER_SCALES,
    LAYERS,
    Header,
    Place,
    Shard,
    StateFiles,
    decoded,
    key_of,
    read_header,
)
from eagle_train.models.target import Target
from eagle_train.progress import progress
from eagle_train.training.assembly import round_target

_COMPUTED = 8  # documents that are computed anew
# The most by which states may differ, as a share of their norm: rounding of another packing, and of what is kept.
_SHARES = {"float32": 1e-3, "bfloat16": 3e-2, "bf16": 3e-2, "fp8": 8e-2}


def verify_cache(run: Run) -> str:
    """Read the cache at `run.cache.out` whole and compute some of its documents with the run's target.

    Returns what was found in a line. Raises UserError where a document is not what was written, and where the target
    computes something else.
    """
    place, folder = f"out={run.cache.out}", Path(run.cache.out)
    header = read_header(folder, place)
    files = StateFiles(folder, header, place)
    found = []
    bar = progress(header.documents, "document")
    for number, name in enumerate(header.shards):
        shard = Shard(folder / name, place)
        keys = shard.array("keys", "u1")
        for key, document in zip(keys, shard.places(number), strict=True):
            _check_document(files, shard, document, key.tobytes())
            found.append(document)
        bar.update(len(found))
    bar.close()
    count = header.documents
    check(len(found) == count, f"{place}: has {len(found)} documents, and was written with {count}")
    chosen = found[:: max(1, len(found) // _COMPUTED)][:_COMPUTED]
    error = _recomputed(run, files, chosen)
    computed = f"{len(chosen)} were computed again, and differ by {error:.2%} at most"
    return f"{run.cache.out}: {len(found):,} documents are what was written; {computed}"


def _tokens(shard: Shard, document: Place) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A document's tokens int64 [n], and which final hidden states are kept, bool [n], where not all are."""
    span = slice(document.first, document.first + document.tokens)
    wanted = shard.array("wanted", "u1")
    tokens = torch.from_numpy(shard.array("tokens", "<i4")[span].copy()).long()
    return tokens, torch.from_numpy(wanted[span].copy()).bool() if len(wanted) else None


def _check_document(files: StateFiles, shard: Shard, document: Place, key: bytes) -> None:
    """Raise UserError for a document that is not what was written, or not found by its key."""
    files.read(document)
    tokens, wanted = _tokens(shard, document)
    name = files.header.shards[document.shard]
    damaged = f"{files.place}: {name} or the index is damaged, at a document of {document.tokens} tokens"
    sound = key_of(tokens, wanted) == key and files.find(key) == document
    check(sound, f"{damaged}; remove the cache and write it again")


def _recomputed(run: Run, files: StateFiles, documents: list[Place]) -> float:
    """The largest relative difference, over documents and parts, between what is kept and what the target computes.

    Raises UserError where it is more than rounding."""
    header, device = files.header, resolve_device(run.cache.device)
    check(
        run.train.target_quant == header.target_quant,
        f"train.target_quant={run.train.target_quant}: {files.place} was written with {header.target_quant}",
    )
    target = load_target(with_dtype(run.target, header), device)
    check(
        target.identity.fingerprint == header.target["fingerprint"],
        f"target.path={run.target.path}: {files.place} was written for {header.target['name']}; give that",
    )
    if header.target_quant == "fp8":
        round_target(target, ALONE)
    most = max(_SHARES[header.dtype], _SHARES.get(header.precision, 0.0))
    worst = 0.0
    for document in documents:
        shard = Shard(files.folder / header.shards[document.shard], files.place)
        error = _difference(target, header, files.read(document), *_tokens(shard, document))
        check(
            error <= most,
            f"{files.place}: {header.shards[document.shard]}: states of a document of {document.tokens} tokens differ "
            f"by {error:.1%} from what the target computes; write the cache again",
        )
        worst = max(worst, error)
    return worst


def _difference(target: Target, header: Header, kept: dict, tokens: torch.Tensor, wanted: torch.Tensor | None) -> float:
    """The relative difference of a document's states, as kept, to what the target computes; the largest of the
    parts."""
    layers, layout = tuple(header.layers), header.layout
    positions = torch.arange(len(tokens))[None].to(target.device)
    states = target.own_states(tokens[None].to(target.device), positions, [[len(tokens)]], layers)[0].float().cpu()
    hidden, *outputs = states.split(layout.hidden, dim=-1)
    own = {name: torch.from_numpy(each.copy()) for name, each in kept.items()}
    scales = own[HIDDEN_SCALES].view(torch.float32).squeeze(-1) if HIDDEN_SCALES in own else None
    pairs = [(decoded(own[HIDDEN].view(layout.stored), scales, layout), hidden if wanted is None else hidden[wanted])]
    if layers:
        scales = own[LAYER_SCALES].view(torch.float32) if LAYER_SCALES in own else None
        stored = own[LAYERS].view(layout.stored).unflatten(-1, (len(layers), -1))
        pairs.append((decoded(stored, scales, layout), torch.stack(outputs, dim=1)))
    return max(((one.float() - other).norm() / other.norm().clamp_min(1e-9)).item() for one, other in pairs)
