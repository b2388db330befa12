"""Plain float64 twins of drafts that learn from steps of their own: one document, one chain, one slot after the other.

Beside them what they and the drafts are given: packed rows with the target's states, and the slots to learn from.
"""

import math

import torch
import torch.nn.functional as F

from eagle_train.drafts import Draft, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.models.target import Target
from tests.support.reference_chains import LENGTHS, documents, positions_of, slot_loss
from tests.support.tiny import tiny_model

STEPS = 4


def exact_target(**changes) -> Target:
    return Target(tiny_model(**changes).double(), name="tiny-llama")


def rows_of(target: Target, layers: tuple[int, ...]) -> tuple[Rows, torch.Tensor]:
    """Packed rows of random tokens with the target's states, and which slots are supervised, bool [B, T]."""
    positions = positions_of(LENGTHS)
    tokens = torch.randint(3, 96, positions.shape, generator=torch.Generator().manual_seed(1))
    states = TargetStates.split(target.own_states(tokens, positions, LENGTHS, layers), layers)
    supervised = (positions > 0) & (torch.rand(positions.shape, generator=torch.Generator().manual_seed(2)) < 0.8)
    return Rows(target.embed(tokens), states, positions, LENGTHS, target.embed), supervised


def slots_of(draft: Draft, rows: Rows, supervised: torch.Tensor) -> list[torch.Tensor]:
    first = draft.config.first_slot
    learnt = (supervised & (rows.positions >= first + step) for step in range(STEPS))
    return [each.flatten().nonzero().squeeze(1) for each in learnt]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """x [heads, D] by the angles of its position, halves convention."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    one, other = x[:, :half], x[:, half:]
    return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)


class Twin:
    """A draft's slot, from its tensors by name. `seen`: keys and values of the slots before, by layer."""

    def __init__(self, draft: Draft, target: Target):
        self.w, self.c, self.target = dict(draft.named_parameters()), draft.config, target
        self.tokens = torch.arange(96) if draft.vocabulary is None else draft.vocabulary

    def slot(self, embedding: torch.Tensor, hidden: torch.Tensor, position: int, seen: dict) -> tuple:
        """What the LM head reads, and what the next slot is fed."""
        raise NotImplementedError

    def first(self, hidden: torch.Tensor, layers: list[torch.Tensor]) -> torch.Tensor:
        """What a chain's root is fed, of the target's states at the token before."""
        raise NotImplementedError

    def next(self, embedding: torch.Tensor, fed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a chain's next slot has beside its position, of its token's embedding and what the one before feeds."""
        return embedding, fed

    def head(self) -> torch.Tensor:
        """The LM head's rows for the draft's tokens."""
        return self.target.lm_head.weight[self.tokens]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms(x, self.w[f"{name}.weight"], self.c.rms_norm_eps)

    def attention(self, layer: int, x: torch.Tensor, position: int, seen: dict) -> torch.Tensor:
        heads = {}
        for name in "qkv":
            heads[name] = (self.w[f"layers.{layer}.self_attn.{name}_proj.weight"] @ x).view(-1, self.c.head_dim)
        theta = self.c.rope_parameters["rope_theta"]
        q, k = (turned(heads[name], position, theta) for name in "qk")
        seen[layer] = [*seen.get(layer, []), (k, heads["v"])]
        groups, out = self.c.num_heads // self.c.num_kv_heads, []
        for head in range(self.c.num_heads):
            last = seen[layer][-self.c.window :] if self.c.window else seen[layer]
            keys, values = (torch.stack([pair[i][head // groups] for pair in last]) for i in range(2))
            scores = keys @ q[head] / math.sqrt(self.c.head_dim)
            if self.c.sink:
                sink = self.w[f"layers.{layer}.self_attn.sinks"][head : head + 1]
                out.append(torch.cat((scores, sink)).softmax(0)[:-1] @ values)
            else:
                out.append(scores.softmax(0) @ values)
        return self.w[f"layers.{layer}.self_attn.o_proj.weight"] @ torch.cat(out)

    def behind_attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """What a layer makes of its residual stream behind its attention."""
        inner, mlp = self.norm(f"layers.{layer}.post_attention_layernorm", x), f"layers.{layer}.mlp"
        gate, up = (self.w[f"{mlp}.{name}_proj.weight"] @ inner for name in ("gate", "up"))
        return x + self.w[f"{mlp}.down_proj.weight"] @ (F.silu(gate) * up)

    def loss(self, out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Of one slot, from the target's logits there."""
        return slot_loss(self.c.loss, wanted, self.head() @ out)


class Eagle3Twin(Twin):
    def head(self) -> torch.Tensor:
        return self.w["lm_head.weight"]

    def first(self, hidden: torch.Tensor, layers: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat(layers)
        if self.c.norm_before_fc:
            whole = self.norm("input_norm", whole)
        if self.c.fc_norm:
            chunks = whole.view(len(layers), -1)
            whole = torch.cat([self.norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)])
        return self.w["fc.weight"] @ whole

    def slot(self, embedding: torch.Tensor, hidden: torch.Tensor, position: int, seen: dict) -> tuple:
        x = hidden
        for layer in range(self.c.num_layers):
            place = f"layers.{layer}"
            normed = self.norm(f"{place}.hidden_norm" if layer == 0 else f"{place}.input_layernorm", x)
            read = torch.cat((self.norm(f"{place}.input_layernorm", embedding), normed)) if layer == 0 else normed
            x = normed if layer == 0 and self.c.norm_before_residual else x
            x = self.behind_attention(layer, x + self.attention(layer, read, position, seen))
        out = self.norm("norm", x)
        return out, out if self.c.norm_output else x


class PeagleTwin(Eagle3Twin):
    def next(self, embedding: torch.Tensor, fed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A mask slot's, whatever the token is and the slot before gave."""
        return self.target.embedding[self.c.mask_token], self.first(fed, list(self.w["mask_hidden"].chunk(self.fused)))

    @property
    def fused(self) -> int:
        return len(self.c.target_layers)


class MtpTwin(Twin):
    def first(self, hidden: torch.Tensor, layers: list[torch.Tensor]) -> torch.Tensor:
        return hidden

    def slot(self, embedding: torch.Tensor, hidden: torch.Tensor, position: int, seen: dict, module: int = 0) -> tuple:
        around = f"further.{module - 1}." if module else ""
        both = torch.cat((self.norm(f"{around}enorm", embedding), self.norm(f"{around}hnorm", hidden)))
        x = self.w[f"{around}fc.weight"] @ both
        read = self.norm(f"layers.{module}.input_layernorm", x)
        x = self.behind_attention(module, x + self.attention(module, read, position, seen))
        return self.norm(f"{around}norm", x), x


def modules_loss(twin: MtpTwin, rows: Rows, supervised: torch.Tensor) -> torch.Tensor:
    """The same of modules in a chain, one after the other, each over all slots at which the one before gave something
    at the slot before; then the last one's own chains."""
    total, begin = torch.zeros((), dtype=torch.float64), 1 if twin.c.first_token == "skip" else 0
    weights = [twin.c.decay**step for step in range(STEPS)]
    for row, place in documents(LENGTHS):
        embeddings, hidden = rows.embeddings[row, place], rows.states.hidden[row, place]
        learnt, found = supervised[row, place], {}  # what the LM head reads, by pass and slot
        fed = {slot: hidden[max(slot - 1, 0)] for slot in range(begin, len(embeddings))}
        true = []  # by module: its keys and values after so many slots, by slot
        for module in range(twin.c.modules):
            seen, given, kept = {}, {}, {}
            for slot, each in fed.items():
                found[module, slot], given[slot + 1] = twin.slot(embeddings[slot], each, slot, seen, module)
                kept[slot] = {layer: list(pairs) for layer, pairs in seen.items()}
            true.append(kept)
            fed = {slot: each for slot, each in given.items() if slot < len(embeddings)}
        last = twin.c.modules - 1
        for first, each in fed.items():  # a chain of the last module, behind its own true slots
            own = {layer: list(pairs) for layer, pairs in true[last][first - 1].items()}
            for step in range(last + 1, min(STEPS, len(embeddings) - first + last + 1)):
                slot = first + step - last - 1
                found[step, slot], each = twin.slot(embeddings[slot], each, slot, own, last)
        for (step, slot), out in found.items():
            if learnt[slot]:
                wanted = (twin.target.lm_head.weight @ hidden[slot])[twin.tokens]
                total = total + weights[step] / sum(weights) * twin.loss(out, wanted)
    return total


def twin_loss(twin: Twin, rows: Rows, supervised: torch.Tensor) -> torch.Tensor:
    """The mean over passes, weighted by decay; every chain is drafted by itself, from the true keys up to its root."""
    total, begin = torch.zeros((), dtype=torch.float64), 1 if twin.c.first_token == "skip" else 0
    weights = [twin.c.decay**step for step in range(STEPS)]
    for row, place in documents(LENGTHS):
        embeddings, hidden = rows.embeddings[row, place], rows.states.hidden[row, place]
        layers = [rows.states.layers[layer][row, place] for layer in twin.c.target_layers]
        learnt, true = supervised[row, place], {}
        for root in range(begin, len(embeddings)):
            before = max(root - 1, 0)
            fed = twin.first(hidden[before], [x[before] for x in layers])
            out, fed = twin.slot(embeddings[root], fed, root, true)
            own = {layer: list(pairs) for layer, pairs in true.items()}
            for step in range(min(STEPS, len(embeddings) - root)):
                slot = root + step
                if step > 0:
                    out, fed = twin.slot(*twin.next(embeddings[slot], fed), slot, own)
                if learnt[slot]:
                    wanted = (twin.target.lm_head.weight @ hidden[slot])[twin.tokens]
                    total = total + weights[step] / sum(weights) * twin.loss(out, wanted)
    return total
