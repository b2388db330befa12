"""A small random twin of a target: its family, switches, layers and their order, with narrow layers and short windows.

What a model does to attention behind its windows, chunks and RoPE's borders shows in a twin within a few tokens, where
the model itself would have to read thousands. Knows nothing of weights on the disk, drafts or training.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from eagle_train.models.shapes import heads_of, rope_limit
from eagle_train.transformers_private import model_from_config

VOCABULARY = 128
WINDOW, CHUNK, BORDER, BLOCK = 8, 6, 5, 2  # no two the same, and behind each lies most of a probe's text
NUM_EXPERTS = 4  # and every token goes through all: which are chosen may depend on a rounding
HEAD_WIDTH = 16
SMALL = 128  # layers of this width are left as they are
NARROWER = 8  # than layers, what is within them
NUM_PARAMETERS = 2e8  # of a twin, at most

# Names of a config's fields.
KEYS = re.compile(r"key_value_heads$|kv_heads$")
QUERIES = re.compile(r"attention_heads$|^n_heads?$|^num_heads?$|^mamba_n(um)?_heads$")
HEAD_WIDTHS = re.compile(r"head_dim$|head_width$|^rotary_dim$|^kv_channels$|^mamba_d_head$")
INNER = re.compile(r"intermediate|inner$|^d_ff$|ffn_\w*(dim|size)$|expert_\w*size$")  # widths that no other must fit
WIDTHS = re.compile(r"hidden_size|(^|_)(dim|rank|width)s?$|^d_model$|^n_embd$|^mamba_d_ssm$")
WINDOWS = re.compile(r"window(_sizes?)?$|^index_topk$")
CHUNKS = re.compile(r"chunk_size$")
BLOCKS = re.compile(r"block_size$|topk_blocks$|kpool$")  # of keys, of which some are chosen
BORDERS = re.compile(r"^floor_scale$|^original_max_position_embeddings$|_n_floor$")
DEPTHS = re.compile(r"^(encoder_|decoder_)?(num_hidden_)?layers$|^(num_layers|depth|n_layers?|num_blocks)$")
TOKEN_IDS = re.compile(r"_token_(id|index)$|_index$")
EXPERTS = re.compile(r"^(num|n|moe_num)_(local_|routed_)?experts$")
CHOSEN = re.compile(r"experts_per_tok(en)?$|^top_k_experts$|^moe_top_?k$|^moe_k$|^num_selected_experts$")
GROUPS = re.compile(r"^n_group$|^topk_group$|^num_expert_groups?$")
FEW = ((WINDOWS, WINDOW), (CHUNKS, CHUNK), (BLOCKS, BLOCK), (GROUPS, 1))
BY_FREQUENCY = ("long_factor", "short_factor")  # lists of half a head's width
DROPPED = ("quantization_config", "dtype", "torch_dtype", "_name_or_path")


@dataclass(frozen=True)
class _Squeeze:
    """What a text model's numbers of heads, their width, and its layers' width are divided by.

    `all_experts`: every token goes through all experts of few, so that no choice depends on a rounding.
    """

    queries: int = 1
    keys: int = 1
    head_width: int = 1
    width: int = 1
    all_experts: bool = True

    @classmethod
    def of(cls, text: Any) -> "_Squeeze":
        """To two heads of keys and values if there are as many, and the fewest queries that are some for each."""
        heads = heads_of(text)
        if text.hidden_size <= SMALL:
            return cls()
        keys = 2 if heads.keys % 2 == 0 else heads.keys
        fewest = keys if heads.queries == heads.keys else keys + 1
        queries = next(n for n in range(fewest, heads.queries + 1) if heads.queries % n == 0 and n % keys == 0)
        by_width = max(1, heads.width // HEAD_WIDTH) if heads.width % HEAD_WIDTH == 0 else 1
        return cls(heads.queries // queries, heads.keys // keys).narrower(by_width, text.hidden_size)

    def narrower(self, head_width: int, hidden: int) -> "_Squeeze":
        """With heads so much narrower, and layers of `hidden` numbers by as much as all heads are, or nearly so."""
        width = self.queries * head_width
        if hidden % width:
            width = math.gcd(2 ** (width.bit_length() - 1), hidden)
        return replace(self, head_width=head_width, width=width)


def twin_of(model_class: type[PreTrainedModel], config: Any) -> PreTrainedModel | None:
    """A twin of models of this class and config, in fp32 on the CPU; None where none so small can be built.

    Raises what its family does where it reads no text alone.
    """
    failure = None
    for squeeze, others in _attempts(config):
        twin = _built(model_class, config, squeeze, others)
        if twin is not None:
            try:
                twin(input_ids=torch.ones(1, 2, dtype=torch.long), use_cache=False)
                return twin
            except Exception as error:  # families raise what they like for what is narrower than they allow
                failure = error
    if failure is not None:
        raise failure
    return None


def _built(model_class: type[PreTrainedModel], config: Any, squeeze: _Squeeze, others: bool) -> PreTrainedModel | None:
    try:
        small = _small_config(config, squeeze, others)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in model_from_config(model_class, small).parameters())
        return _randomised(model_class, small) if size <= NUM_PARAMETERS else None
    except Exception:  # as above
        return None


def longest_border(text: Any) -> int:
    """The largest window, chunk or border of RoPE that a text model's config names, 0 where it names none."""

    def sizes(values: Mapping[str, Any]) -> Iterator[int]:
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from sizes(value)
            elif _is_count(value) and any(names.search(str(key)) for names in (WINDOWS, CHUNKS, BORDERS)):
                yield value

    return max(sizes(text.to_dict()), default=0)


def _attempts(config: Any) -> Iterator[tuple[_Squeeze, bool]]:
    """How narrow to try to make a twin: the text model's squeeze, and whether other models beside it are squeezed."""
    text = config.get_text_config()
    squeeze = _Squeeze.of(text)
    for each in (squeeze, squeeze.narrower(1, text.hidden_size), replace(squeeze, all_experts=False)):
        yield from ((each, True), (each, False))
    yield _Squeeze(), False


def _small_config(config: Any, squeeze: _Squeeze, others: bool) -> Any:
    """The same kind of config, for a twin."""
    text = config.get_text_config()
    return type(config).from_dict(_shrunk(config, text, squeeze, others))


def _shrunk(config: Any, text: Any, squeeze: _Squeeze, others: bool) -> dict[str, Any]:
    """The fields of a config or of one within it: the text model's are squeezed, and `others` too or of one layer."""
    values = {key: value for key, value in config.to_dict().items() if key not in DROPPED}
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            values[name] = _shrunk(inner, text, squeeze, others)
    if config is text:
        return _squeezed(values, squeeze, rope_limit(text) is not None)
    has_layers = all(hasattr(config, name) for name in ("hidden_size", "num_attention_heads"))
    own = _Squeeze.of(config) if others and has_layers else _Squeeze()
    if not others:
        depth = getattr(config, "num_hidden_layers", None)
        values |= {key: [value[0]] for key, value in values.items() if isinstance(value, list) and len(value) == depth}
        values |= {key: 1 for key, value in values.items() if DEPTHS.search(key) and _is_count(value)}
    return {key: _field_beside(key, value, text.hidden_size, squeeze, own) for key, value in values.items()}


def _field_beside(key: str, value: Any, hidden: int, squeeze: _Squeeze, own: _Squeeze) -> Any:
    """The value of a field beside the text model's: of what holds it, or of a model of images or sounds."""
    if not _is_count(value):
        return value
    if TOKEN_IDS.search(key):
        return VOCABULARY - 1
    if value == hidden and WIDTHS.search(key):  # what hands over to the text model
        return value // squeeze.width
    return _divided(key, value, own)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _squeezed(values: Mapping[str, Any], squeeze: _Squeeze, limited: bool) -> dict[str, Any]:
    """A text model's fields, its mappings' too. `limited`: a text ends at RoPE's border, which stays where it is."""
    return {key: _field(str(key), value, squeeze, limited) for key, value in values.items()}


def _field(key: str, value: Any, squeeze: _Squeeze, limited: bool) -> Any:
    """A field's value in the twin."""
    if isinstance(value, Mapping):
        return _squeezed(value, squeeze, limited)
    if isinstance(value, list) and any(names.search(key) for names in (INNER, WINDOWS, CHUNKS)):  # by layer
        return [_field(key, each, squeeze, limited) for each in value]
    if key in BY_FREQUENCY and isinstance(value, list | tuple):
        return list(value)[:: squeeze.head_width]
    if key == "mrope_section" and value:
        sections = [each // squeeze.head_width for each in value]
        return [sections[0] + sum(value) // squeeze.head_width - sum(sections), *sections[1:]]
    if not _is_count(value):
        return value
    if squeeze.all_experts and value > 0 and (EXPERTS.search(key) or CHOSEN.search(key)):
        return NUM_EXPERTS
    if "vocab_size" in key:
        return min(value, VOCABULARY)
    if key.endswith("_token_id"):
        return min(value, VOCABULARY - 1)
    for names, few in (*FEW, (BORDERS, value if limited else BORDER)):
        if names.search(key):
            return min(value, few)
    return _divided(key, value, squeeze)


def _divided(key: str, value: int, squeeze: _Squeeze) -> int:
    """A number of heads or a width in the twin; other numbers as they are."""
    within = NARROWER if squeeze.width > 1 else 1
    divisors = (
        (KEYS, squeeze.keys),
        (QUERIES, squeeze.queries),
        (HEAD_WIDTHS, squeeze.head_width),
        (INNER, squeeze.width * within),
        (WIDTHS, squeeze.width),
    )
    by = next((by for names, by in divisors if names.search(key)), 1)
    if INNER.search(key):  # by a power of two, and grouped products need rows of 16 bytes
        by = math.gcd(2 ** (by.bit_length() - 1), value // 4)
    return value // by if value % by == 0 else value


def _randomised(model_class: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model whose matrices, norms, biases and sinks all matter; no other's random numbers are changed by it."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        model = model_from_config(model_class, config, torch.float32)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.2 * noise)
    return model.eval()
