"""OpenAI's penalties as a logits processor of transformers."""

from transformers import LogitsProcessor


class Penalties(LogitsProcessor):
    """Presence and frequency penalties as OpenAI defines them, of one row."""

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, ids, scores):
        counts = ids[0, self.prompt_length :].bincount(minlength=scores.shape[1])
        return scores - self.presence * (counts > 0) - self.frequency * counts
