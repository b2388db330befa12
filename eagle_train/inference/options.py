"""The engine's options, for Python, Hydra (`conf/engine`) and reports. Knows nothing of models or requests.

DESIGN section 3.9.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_train.errors import OptionError, check, shown
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.sampling import DRAFT_MODES
from eagle_train.inference.drafters.eagle import check_alignment
from eagle_train.inference.requests.sampling_params import is_whole

KERNELS = ("auto", "plain")
DRAFT_LM_HEADS = ("target", "fp8", "int4")
TREE_ATTENTIONS = ("split", "joint")


@dataclass
class DraftOptions:
    """The draft of a command. `path`: a directory that eagle-export wrote; None: plain decoding. `alignment`: which
    tokens of a round the draft processes again with the target's hidden states, see `Eagle`. Raises UserError."""

    path: str | None = None
    alignment: str = "accepted"

    def __post_init__(self) -> None:
        check_alignment(self.alignment)

    def check_read_by(self, drafter: Mapping[str, Any]) -> None:
        """Raise UserError for an alignment that a drafter, see `drafter_spec`, does not take."""
        check(
            self.alignment == DraftOptions.alignment or "alignment" in drafter,
            f"draft.alignment={self.alignment}: this drafter does not read it; leave it out, or use drafter=eagle",
        )


@dataclass(frozen=True)
class EngineConfig:
    """How an `Engine` decodes. The defaults are right for most users. Raises OptionError.

    Scheduling
    - `max_batch_size`: requests that decode together.
    - `prefill_tokens`: prompt tokens prefilled between two rounds. Bounds how long a prefill may stall decoding. None:
      whole prompts.
    - `overlap`: launch a round before the results of the previous one are on the host (paper section 3.3). `step` then
      reports each round one call later, and a finished request may take part in one more round. A round with a request
      that has a grammar, penalties, a `min_tokens` that is not reached, or a drafter that reads texts is waited for.
      None: on a GPU.

    Memory
    - `kv_tokens`: size of the KV cache in tokens, drafted ones included. Requests wait for free blocks, or are
      preempted and recomputed. None: as many as `max_batch_size` of the requests may need; on a GPU as many of these as
      fit in its free memory. With `graphs` it is allocated in the constructor, and None means requests that fill the
      target's context; give a number to leave memory to other programs or engines.
    - `prefix_cache`: prefill starts where a prompt differs from earlier sequences. Cached blocks are evicted
      least-recently-used.
    - `host_kv_tokens`: size of a second cache in host memory, for evicted blocks; needs `prefix_cache`.

    Drafts
    - `drafting`: how a node's children are chosen above temperature 0: greedy, multinomial or
      multinomial_without_replacement. With greedy drafts a seed gives the same tokens as without drafts, except for
      rounding. In the other modes the tokens of a seed depend on the tree, and so on the batch size if sizes have trees
      of their own; with `Eagle`'s alignment `last` also on whether a prompt was found in the cache or recomputed. They
      do not depend on what else the batch's requests are. Their distribution is the same.
    - `gate`: decode plainly in rounds in which the tree's drafts are not expected to pay, by the acceptance so far and
      by what rounds take; they are tried again later. `tree=auto` always does so. Rounds are timed in the constructor.
      The tokens of a seed then depend on time where drafts are drawn.
    - `draft_lm_head`: what an EAGLE draft's states are multiplied with: the LM head of the `target`, or a copy of it in
      `fp8` or `int4` (groups of 128), beside it in memory. Drafts may differ, and how many are accepted; outputs do
      not, nor does the distribution of drawn ones. Unused without a draft.

    Speed; none of these changes an output, except for rounding
    - `compile`: torch.compile for the decoding forwards of target and drafter, and on a GPU for the verification of
      sampled rounds (paper section 3.2). Compiles in the constructor, for a batch of one and for larger ones. Prefill
      is not compiled.
    - `compile_sampling`: torch.compile for the verification of sampled rounds only; None: with `compile`, on a GPU.
    - `graphs`: record rounds as CUDA graphs in the constructor (paper section 3.4), so that no request waits for it;
      with a grammar drafting and the end in parts, with min-p, penalties, biases or log-probabilities all but the end.
      Needs a GPU and a target that is not offloaded; ranks that hold one together must talk by NCCL. None: on a GPU,
      unless the target is divided, offloaded or quantised, a drafter may have the host wait, or either has experts.
    - `divide_sampling`: ranks of one tensor-parallel target sample a part of the batch each (paper section 3.2); false:
      each rank samples the whole batch, and the first one's tokens count.
    - `divide_draft`: ranks of one tensor-parallel target hold and run a part each of an EAGLE draft and of the LM head
      that it proposes with; false: each the whole. None: what is faster, by the speeds of memory and of the ranks' talk
      that are measured at the start, for a draft without experts, not quantised, whose sizes divide; with
      disaggregated prefill it must be given.
    - `divide_lm_head`: they multiply with a part of the LM head each, for all rows, and exchange logits; false: with
      all of it, for their own rows. None: what is faster, as above.
    - `attention`: `plain` computes attention by matrix products and a softmax instead of the device's kernels.
    - `tree_attention`: `split` computes attention over prefix and tree apart and merges (paper section 3.1); `joint`
      over both at once, under one mask.
    - `linear`: `plain` uses torch's own matrix products in place of the kernels for few rows, and logits and
      their maximum in place of a GPU's kernel for the most likely token of a draft.
    """

    max_batch_size: int = 16  # requests that decode together
    prefill_tokens: int | None = 8192  # prompt tokens prefilled between two rounds; null: whole prompts
    overlap: bool | None = None  # launch a round before the previous one's results are on the host; null: on a GPU
    kv_tokens: int | None = None  # size of the KV cache in tokens; null: what requests may need, or a GPU has
    prefix_cache: bool = False  # true: prefill a prompt from where it differs from earlier sequences
    host_kv_tokens: int = 0  # size of the cache in host memory for evicted blocks, in tokens; needs prefix_cache
    drafting: str = "greedy"  # above temperature 0: greedy | multinomial | multinomial_without_replacement
    gate: bool = False  # true: no drafts in rounds in which they are not expected to pay
    draft_lm_head: str = "target"  # target | fp8 | int4: drafts are proposed with the LM head, or a copy in few bits
    compile: bool = False  # true: torch.compile for the decoding forwards, at the start
    compile_sampling: bool | None = None  # torch.compile for verification; null: with compile, on a GPU
    graphs: bool | None = None  # rounds as CUDA graphs; null: on a GPU, but for experts
    divide_sampling: bool = True  # tensor-parallel ranks sample a part of the batch each
    divide_draft: bool | None = None  # tensor-parallel ranks run a part of the draft each; null: what is faster
    divide_lm_head: bool | None = None  # they read a part of the LM head each; null: what is faster
    attention: str = "auto"  # auto | plain: matrix products and a softmax in place of the device's kernels
    tree_attention: str = "split"  # split | joint: prefix and tree apart, or at once under one mask
    linear: str = "auto"  # auto | plain: torch's products in place of the device's kernels for few rows

    def __post_init__(self) -> None:
        for name, (least, may_be_none) in _NUMBERS.items():
            value = getattr(self, name)
            wanted = f"must be at least {least}, a whole number" + (", or None" if may_be_none else "")
            check(
                is_whole(value, least) or (may_be_none and value is None),
                f"{name}={shown(value)}: {wanted}",
                OptionError,
            )
        for name, may_be_none in _SWITCHES.items():
            value = getattr(self, name)
            wanted = "must be True or False" + (", or None" if may_be_none else "")
            check(
                isinstance(value, bool) or (may_be_none and value is None),
                f"{name}={shown(value)}: {wanted}",
                OptionError,
            )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            check(value in choices, f"{name}={shown(value)}: must be one of {', '.join(choices)}", OptionError)
        host = self.host_kv_tokens
        if host > 0 and not self.prefix_cache:
            raise OptionError(f"host_kv_tokens={host}: needs prefix_cache=True", "prefix_cache")
        wanted = f"must be 0 (none) or at least {BLOCK}, one block"
        check(host == 0 or host >= BLOCK, f"host_kv_tokens={host}: {wanted}", OptionError)


_NUMBERS = {  # the least, and whether None is a value
    "max_batch_size": (1, False),
    "kv_tokens": (1, True),
    "prefill_tokens": (1, True),
    "host_kv_tokens": (0, False),
}
_SWITCHES = {  # whether None is a value
    "prefix_cache": False,
    "gate": False,
    "compile": False,
    "compile_sampling": True,
    "overlap": True,
    "graphs": True,
    "divide_sampling": False,
    "divide_draft": True,
    "divide_lm_head": True,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "drafting": DRAFT_MODES,
    "draft_lm_head": DRAFT_LM_HEADS,
    "attention": KERNELS,
    "tree_attention": TREE_ATTENTIONS,
    "linear": KERNELS,
}
