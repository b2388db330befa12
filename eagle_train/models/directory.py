"""What a directory that is given as a target holds, where that is no checkpoint in Hugging Face's format.

Told by its files' names and first bytes, before a library looks at it.
"""

import json
from pathlib import Path

from eagle_train.config import UserError, check, foreign

LFS = b"version https://git-lfs.github.com/spec/"
GGUF = b"GGUF"
READ = (
    "*.json",
    "*.safetensors",
    "*.bin",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*.txt",
)  # what libraries read of a checkpoint
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
INDEX = ".index.json"
FILES = ("model.safetensors", "pytorch_model.bin")  # transformers reads the first that is there, whole or by its index

ORIGINAL = (
    "weights in their maker's own format; give the Hugging Face version, or convert them (transformers has "
    "convert_llama_weights_to_hf.py and the like)"
)
MERGE = (
    "LoRA or other PEFT adapters{}; merge them into the model first (peft: model.merge_and_unload(), then "
    "save_pretrained()) and give the merged directory"
)
ALONE = "weights without config.json; copy it from where the weights come from"
FOREIGN = {  # weights that cannot be read, by a pattern of their files
    "*.gguf": "GGUF files, which cannot be trained on; give the Hugging Face checkpoint that they were made from",
    "consolidated*": ORIGINAL,
    "zero_to_fp32.py": "DeepSpeed's shards; run `python zero_to_fp32.py . .` there",
    "*.pth": "weights in a .pth file; give a checkpoint in safetensors, as save_pretrained() writes",
    "*.pt": "weights in a .pt file; give a checkpoint in safetensors, as save_pretrained() writes",
    "*.distcp": "a distributed checkpoint of torch; give a checkpoint in safetensors, as save_pretrained() writes",
    "onnx/*.onnx": "an ONNX model; give the Hugging Face checkpoint that it was made from",
    "*.onnx": "an ONNX model; give the Hugging Face checkpoint that it was made from",
    "*.h5": "weights of TensorFlow; give a checkpoint in safetensors",
    "*.msgpack": "weights of JAX; give a checkpoint in safetensors",
    "*.nemo": "a NeMo archive; give a Hugging Face checkpoint",
}
NO_CONFIG = FOREIGN | {
    "params.json": ORIGINAL,
    "model_index.json": "a diffusion pipeline; a target is a causal language model",
    "step-*": "a training run's checkpoints of a draft; give the target that it was trained for",
    "manifest.json": "a checkpoint of a draft; give the target that it was trained for",
    "*.safetensors": ALONE,
    "pytorch_model*.bin": ALONE,
    "tokenizer*": "a tokenizer alone; give the directory that has config.json and the weights too",
}


def check_directory(path: Path) -> None:
    """Raise UserError for a directory, or a file, that is no checkpoint: what it is, and what to do."""
    place = f"target.path={path}"
    if path.is_file():
        kind = "a GGUF file, which cannot be trained on" if begins(path, GGUF) else "a file"
        raise UserError(f"{place}: {kind}; give a Hugging Face checkpoint's directory")
    for file in sorted(file for pattern in READ for file in path.glob(pattern)):
        check(
            not begins(file, LFS),
            f"{place}: {file.name} is a Git LFS pointer, not the file it stands for; run `git lfs pull` there",
        )
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{place}: {MERGE.format(base_of(path))}")
    embeds = (path / "config_sentence_transformers.json").is_file()
    check(
        not embeds, f"{place}: a model of sentence-transformers, which makes embeddings; a target goes on with a text"
    )
    has_config = (path / "config.json").is_file()
    if has_config and any(any(path.glob(pattern)) for pattern in WEIGHTS):
        check_shards(path)
        return
    for pattern, kind in (FOREIGN if has_config else NO_CONFIG).items():
        check(not any(path.glob(pattern)), f"{place}: {kind}")
    inner = sorted(each.parent for pattern in ("*", "snapshots/*") for each in path.glob(f"{pattern}/config.json"))
    instead = f"{inner[-1]}, which has one" if inner else "a Hugging Face checkpoint's directory"
    check(has_config, f"{place}: no config.json there; give {instead}")


def weight_files(path: Path) -> list[Path]:
    """The files of weights that transformers reads of a directory, there or not: one, or those that its index names.

    Only the index that is read counts: many keep that of another format without its files. Raises UserError for one
    that cannot be read.
    """
    found = next((path / name for file in FILES for name in (file, file + INDEX) if (path / name).is_file()), None)
    if found is None or not found.name.endswith(INDEX):
        return [] if found is None else [found]
    with foreign(f"target.path={path}: {found.name} cannot be read"):
        return [path / name for name in sorted(set(json.loads(found.read_text("utf-8"))["weight_map"].values()))]


def check_shards(path: Path) -> None:
    """Raise UserError where some files of weights are there, and others that the index names are not."""
    named = weight_files(path)
    missing = [file.name for file in named if not file.exists()]
    check(
        not missing,
        f"target.path={path}: {len(missing)} of {len(named)} files of weights are missing, {missing[:1]} first; "
        "download them again",
    )


def base_of(path: Path) -> str:
    """Which model adapters say they are for, in words."""
    with foreign(f"target.path={path}: adapter_config.json cannot be read"):
        base = json.loads((path / "adapter_config.json").read_text("utf-8")).get("base_model_name_or_path")
    return f" of {base}" if base else ""


def begins(file: Path, magic: bytes) -> bool:
    """Whether a file begins so; one that cannot be read does not."""
    if not file.is_file():
        return False
    with foreign(f"{file}: cannot be read"), file.open("rb") as stream:
        return stream.read(len(magic)) == magic
