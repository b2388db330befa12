"""Which renderings of the same prompts are tried, by what the chat template does with its variables."""

from typing import Any

import pytest

from eagle_train.diagnosis.measure import Measured
from eagle_train.diagnosis.template import other_templates
from eagle_train.diagnosis.texts import Question
from eagle_train.errors import UserError
from eagle_train.inference import Requests
from tests.support.tiny import tiny_target, tiny_tokenizer

MESSAGES = [{"role": "user", "content": "True or False?"}]


def tried(template: str, training: dict[str, Any] | None = None) -> list[str]:
    """By what is told of each: nothing can be answered here."""
    target = tiny_target(tokenizer=tiny_tokenizer())
    target.tokenizer.chat_template = "{{ messages[0]['content'] }}" + template
    requests = Requests(target)
    question = Question("a", MESSAGES, requests.tokens_of(MESSAGES, "a"), None)

    def examine(prompts: list[list[int]]) -> Measured:
        raise UserError("not asked")

    own: Any = None
    found = other_templates(requests, [question], own, training or {}, examine, 0)
    return [each.check.removeprefix("prompts rendered with ") for each in found.not_checked]


NONE = ["thinking on or off"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if enable_thinking %}<t>{% endif %}", ["enable_thinking=true"]),
        ("{% if not enable_thinking is defined or enable_thinking %}<t>{% endif %}", ["enable_thinking=false"]),
        ("{% if on is defined %}{{ 'a' if on else 'b' }}{% endif %}", ["on=true", "on=false"]),
        ("{{ 'r: ' ~ (reasoning_effort or 'medium') }}", ["reasoning_effort=low", "reasoning_effort=high"]),
        ("{% if model_identity %}{{ model_identity }}{% endif %}", NONE),
        ("{{ thinking_budget if thinking_budget is defined else 512 }}", NONE),
        ("{% if tools_in_text is defined %}c{% endif %}", NONE),  # the same for both
        ("{% if new_date %}d{% endif %}{% if some_time %}e{% endif %}", NONE),
        ("{{ raise_exception('no') if thinking else '' }}", NONE),
    ],
)
def test_a_variable_is_tried_with_values_that_it_takes(template, expected):
    assert tried(template) == expected


def test_the_values_of_the_training_are_tried_first():
    training = {"data": {"template_kwargs": {"model_identity": "c"}}}
    told = tried("{{ model_identity }}{% if thinking %}<t>{% endif %}", training)
    assert told == ["model_identity=c", "thinking=true"]
