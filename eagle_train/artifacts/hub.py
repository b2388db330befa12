"""Drafts on the Hugging Face hub: download and upload. Knows nothing of what is in them."""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from eagle_train.drafts.layouts import TOKEN_MAP
from eagle_train.errors import UserError, one_line

_FILES = ["*.json", "*.safetensors", "pytorch_model*.bin", "medusa_lm_head.pt", TOKEN_MAP]


def fetch(name: str, field: str) -> Path:
    """The directory `name`, or the local copy of the hub repository OWNER/NAME. Raises UserError, which names
    `field`."""
    path = Path(name).expanduser()
    if path.exists() or path.is_absolute() or name.startswith(".") or len(path.parts) != 2:
        return path
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # the hub's library raises many kinds
        raise UserError(f"{field}={name}: no such directory, and not on the hub: {one_line(error)}") from error


def push(directory: Path, name: str, private: bool) -> str:
    """Upload an exported directory; returns its address on the hub. Raises UserError; the directory stays."""
    hub = HfApi()
    try:
        address = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=directory, commit_message="A draft for speculative decoding")
    except Exception as error:  # the hub's library raises many kinds
        raise UserError(f"push_to={name}: {one_line(error)}; the draft is in {directory}") from error
    return str(address)
