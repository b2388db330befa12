"""evals/bench/growth.py: exponents of times that follow a power law, and none where there is no line."""

import pytest

from evals.bench.growth import growth


def rows(*cells: tuple[int, int | None], law=lambda batch, context: batch**0.5 * context**1.5):
    return [
        {"decoding": "plain", "batch_size": batch, "context_length": context, "ttit_p50_s": law(batch, context or 1)}
        for batch, context in cells
    ]


def test_exponents_of_a_power_law():
    found = growth(rows((1, 64), (8, 64), (8, 512), (2, 512), (1, 512)))
    exponents = {(each["over"], each["at"]): each["exponent"] for each in found}
    assert exponents == {
        ("batch_size", 64): pytest.approx(0.5),
        ("batch_size", 512): pytest.approx(0.5),
        ("context_length", 1): pytest.approx(1.5),
        ("context_length", 8): pytest.approx(1.5),
    }


def test_the_nearest_law_where_none_fits():
    found = growth(rows((1, 10), (2, 10), (4, 10), law=lambda batch, _: {1: 1.0, 2: 1.0, 4: 4.0}[batch]))
    assert [each["exponent"] for each in found] == [pytest.approx(1.0)]


def test_one_cell_is_no_line():
    assert growth(rows((4, 256))) == []
    assert [each["over"] for each in growth(rows((4, None), (8, None)))] == ["batch_size"]  # questions as they are


def test_variants_are_told_apart():
    two = rows((1, 64), (2, 64)) + [row | {"decoding": "other", "ttit_p50_s": 1.0} for row in rows((1, 64), (2, 64))]
    assert {each["decoding"]: round(each["exponent"], 6) for each in growth(two)} == {"plain": 0.5, "other": 0.0}
