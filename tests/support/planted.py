"""Causes of low acceptance, each planted in a copy of a healthy draft of tests/support/doctor."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle_train.artifacts.convert import ExportConfig, Source, convert
from eagle_train.artifacts.format import load_draft, read_artifact, save_draft
from eagle_train.corpus.source import DataConfig
from eagle_train.diagnosis import Diagnosis, DoctorConfig, examine
from eagle_train.diagnosis.options import DraftPath
from eagle_train.diagnosis.vllm import VLLM
from eagle_train.drafts import Draft
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.loading import TargetConfig, load_target
from tests.support.doctor_models import PLACE

TARGET = TargetConfig(str(PLACE / "target"), dtype="float32")


def examined(
    draft: Path | str, questions: str = "questions", target: TargetConfig = TARGET, **changes: Any
) -> Diagnosis:
    """The diagnosis of a draft on 16 questions."""
    given: dict[str, Any] = {
        "data": DataConfig(str(PLACE / f"{questions}.jsonl"), columns={"messages": "messages"}),
        "trained": None,
        "out": "unused",
        "limit": 16,
        "max_tokens": 40,
        "depth": 3,
        "vllm": VLLM("no-such-python", 60.0, 1, None),
        "batch_size": 16,
        "serving_dtype": None,
        "device": "cpu",
        "seed": 0,
    }
    return examine(DoctorConfig(target=target, draft=DraftPath(str(draft)), **given | changes))


def causes(found: Diagnosis) -> list[str]:
    return [each.cause for each in found.findings]


def native(place: Path, name: str, change: Callable[[Draft], Any], **config: Any) -> Path:
    """A native artifact of the draft of this name, with a change of its module, and of its config's fields."""
    draft = load_draft(PLACE / name)
    with torch.no_grad():
        change(draft)
    made = replace(draft.config, **config).module()
    made.load_state_dict(draft.state_dict())
    return save_draft(made, place, read_artifact(PLACE / name).target, dtype=torch.float32)


def exported(place: Path, name: str, layout: str, quant: str = "none", dtype: str = "bfloat16") -> Path:
    """What eagle-export writes of the draft of this name."""
    source = Source(load_draft(PLACE / name), read_artifact(PLACE / name), PLACE / name)
    config = ExportConfig(
        checkpoint=str(PLACE / name),
        out=str(place),
        layout=layout,
        dtype=dtype,
        quant=Quant(quant),
        rounding="nearest",
        calibration_tokens=1,
        evaluations=[],
        license=None,
        push_to=None,
        push_private=True,
        device="cpu",
        target=copy.copy(TARGET),
    )
    convert(source, config, load_target(TARGET, "cpu"), None)
    return place


def edited(place: Path, change: Callable[[dict], Any]) -> Path:
    """The directory with another config.json."""
    path = place / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return place


def rewritten(place: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The directory with other tensors."""
    path = place / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, {"format": "pt"})
    return place
