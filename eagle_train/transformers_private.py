"""Every private symbol of transformers that this package uses, each behind a function with a public name.

Such symbols may change with any release, so pyproject.toml bounds transformers from above. Each docstring says what the
symbol is for and which public API is missing. All were tested with transformers 5.17 and 5.23. Knows no targets, drafts
or templates of ours. tests/test_private_api.py finds private API that is used anywhere else.
"""

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

if TYPE_CHECKING:  # it imports torch's compiler, SciPy and SymPy: two seconds in each process that only tokenises
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["compiled_template", "decodes_as_usual", "is_stateful", "model_from_config", "supports_sdpa"]


def compiled_template(source: str) -> Any:
    """The jinja2 template that `render_jinja_template` uses for this source: its globals, and the environment with
    transformers' own extensions. Raises jinja2's TemplateError.

    Missing: the globals of a rendering (`strftime_now`) cannot be given to `render_jinja_template`.
    """
    return _compile_jinja_template(source)


def model_from_config(
    model_class: "type[PreTrainedModel]", config: "PreTrainedConfig", dtype: torch.dtype | None = None
) -> "PreTrainedModel":
    """A model with fresh weights, by default in the config's dtype, where the current default device is.

    Missing: `AutoModel.from_config` calls this, and chooses the class itself; the constructor alone leaves out the
    dtype and what notes a layer's outputs.
    """
    return model_class._from_config(config, **({} if dtype is None else {"dtype": dtype}))


def is_stateful(model_class: type | None) -> bool:
    """Whether a class keeps a state that is no key and no value. Missing: transformers says it only here."""
    return bool(getattr(model_class, "_is_stateful", False))


def supports_sdpa(model: "PreTrainedModel") -> bool:
    """Whether a model runs with torch's attention. Missing: `set_attn_implementation` says so by an exception."""
    return model._supports_sdpa


def decodes_as_usual(tokenizer: Any) -> bool:
    """Whether a tokenizer's `decode` is that of all fast tokenizers, which a class of its own may replace.

    Missing: the public method calls a private one, and either may be the one that is replaced.
    """
    fast = PreTrainedTokenizerFast
    return all(getattr(type(tokenizer), name, None) is getattr(fast, name) for name in ("decode", "_decode"))
