"""What a directory that is given as a target, or the hub's cache of a name, holds where that is no checkpoint in
Hugging Face's format. Told by its files' names and first bytes, and by its small JSON files, before a library looks.
"""

import codecs
import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from eagle_train.errors import UserError, check, foreign, one_line, shown

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
UNREAD = ("pytorch_model_fsdp.bin",)
INDEX = ".index.json"
ADAPTERS = "adapter_config.json"
MAPPINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
INNER = ("*", "*/*", "snapshots/*")  # where a directory that is one too high has its checkpoints
FILES = ("model.safetensors", "pytorch_model.bin")  # transformers reads the first that is there, whole or by its index

ORIGINAL = (
    "weights in their maker's own format; give the Hugging Face version, or convert them (transformers has "
    "convert_llama_weights_to_hf.py and the like)"
)
MERGE = (
    "LoRA or other PEFT adapters{}; merge them into the model first (peft: model.merge_and_unload(), then "
    "save_pretrained()) and give the merged directory"
)
SHARDED = "a distributed checkpoint of torch; give a checkpoint in safetensors, as save_pretrained() writes"
COPY = "copy it from where the weights come from"
ALONE = f"weights without config.json; {COPY}"
FOREIGN = {  # weights that cannot be read, by a pattern of their files
    "*.gguf": "GGUF files, which cannot be trained on; give the Hugging Face checkpoint that they were made from",
    "consolidated*": ORIGINAL,
    "zero_to_fp32.py": "DeepSpeed's shards; run `python zero_to_fp32.py . .` there",
    "*.pth": "weights in a .pth file; give a checkpoint in safetensors, as save_pretrained() writes",
    "*.pt": "weights in a .pt file; give a checkpoint in safetensors, as save_pretrained() writes",
    "global_step*": "DeepSpeed's shards; run its zero_to_fp32.py on them",
    "pytorch_model_fsdp*": SHARDED,
    "*.distcp": SHARDED,
    "*/*.distcp": SHARDED,
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


def folder_of(path: str) -> Path | None:
    """Where the files of a target are on this disk: the directory itself, or what the hub's cache has of its name; None
    where there is nothing."""
    if Path(path).is_dir():
        return Path(path)
    found = (try_to_load_from_cache(path, name) for name in (*MAPPINGS, ADAPTERS))
    return next((Path(file).parent for file in found if isinstance(file, str)), None)


def check_directory(path: Path, place: str) -> None:
    """Raise UserError for a directory, or a file, that is no checkpoint: what it is, and what to do.

    `place` begins the message.
    """
    if path.is_file():
        kind = "a GGUF file, which cannot be trained on" if _starts_with(path, GGUF) else "a file"
        raise UserError(f"{place}: {kind}; give a Hugging Face checkpoint's directory")
    for file in sorted(file for pattern in READ for file in path.glob(pattern)):
        check(
            not _starts_with(file, LFS),
            f"{place}: {file.name} is a Git LFS pointer, not the file it stands for; run `git lfs pull` there",
        )
    if (path / ADAPTERS).is_file():
        raise UserError(f"{place}: {MERGE.format(_base_of(path / ADAPTERS, place))}")
    embeds = (path / "config_sentence_transformers.json").is_file()
    check(
        not embeds, f"{place}: a model of sentence-transformers, which makes embeddings; a target goes on with a text"
    )
    has_config = (path / "config.json").is_file()
    if has_config and any(each.name not in UNREAD for pattern in WEIGHTS for each in path.glob(pattern)):
        _check_shards(path, place)
    else:
        for pattern, kind in (FOREIGN if has_config else NO_CONFIG).items():
            check(not any(path.glob(pattern)), f"{place}: {kind}")
        inner = sorted(each.parent for pattern in INNER for each in path.glob(f"{pattern}/config.json"))
        instead = f"{inner[-1]}, which has one" if inner else "a Hugging Face checkpoint's directory"
        check(has_config, f"{place}: no config.json there; give {instead}")
    for name in MAPPINGS:
        if (path / name).exists():
            read_mapping(path / name, place)
            is_marked = _starts_with(path / name, codecs.BOM_UTF8)  # which transformers does not read
            check(not is_marked, f"{place}: {name} begins with a byte order mark; save it as UTF-8 without")


def read_mapping(file: Path, place: str) -> dict[str, Any]:
    """What a JSON file holds. Raises UserError, which `place` begins, unless that is a mapping."""
    try:
        values = json.loads(file.read_text("utf-8-sig"))
    except json.JSONDecodeError as error:
        said = f"no JSON from line {error.lineno}, column {error.colno} on"
        raise UserError(f"{place}: {file.name} is {said}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: {file.name} is no text in UTF-8") from error
    except (OSError, RecursionError) as error:
        raise UserError(f"{place}: {file.name} cannot be read: {one_line(error)}") from error
    check(isinstance(values, dict), f"{place}: {file.name} holds no mapping")
    return values


def weight_files(path: Path, place: str) -> list[Path]:
    """The files of weights that transformers reads of a directory, there or not: one, or those that its index names.

    Only the index that is read counts: many keep that of another format without its files. Raises UserError for one
    that cannot be read.
    """
    found = next((path / name for file in FILES for name in (file, file + INDEX) if (path / name).is_file()), None)
    if found is None or not found.name.endswith(INDEX):
        return [] if found is None else [found]
    named = read_mapping(found, place).get("weight_map")
    names: set[Any] = set(named.values()) if isinstance(named, dict) and named else {None}
    for name in names:
        check(
            isinstance(name, str) and Path(name).name == name,
            f"{place}: weight_map in {found.name} must name the file of each weight, in the same directory, and has "
            f"{shown(name)}",
        )
    return [path / name for name in sorted(names)]


def _check_shards(path: Path, place: str) -> None:
    """Raise UserError where some files of weights are there, and others that the index names are not."""
    named = weight_files(path, place)
    check(bool(named), f"{place}: files of weights, and neither {' nor '.join(FILES)} nor an index of others is there")
    missing = [file.name for file in named if not file.exists()]
    check(
        not missing,
        f"{place}: {len(missing)} of {len(named)} files of weights are missing, {missing[:1]} first; "
        "download them again",
    )


def _base_of(file: Path, place: str) -> str:
    """Which model adapters say they are for, in words."""
    base = read_mapping(file, place).get("base_model_name_or_path")
    return f" of {base}" if base else ""


def _starts_with(file: Path, magic: bytes) -> bool:
    """Whether a file begins so; one that cannot be read does not."""
    if not file.is_file():
        return False
    with foreign(f"{file}: cannot be read"), file.open("rb") as stream:
        return stream.read(len(magic)) == magic
