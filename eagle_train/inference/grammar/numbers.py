"""Regular expressions for the decimal texts of ranges of numbers. Knows nothing of schemas, EBNF or tokens.

Bounds are Decimals, so comparisons are exact. Numbers in a range have no exponent and at most _DIGITS significant
digits, so that a reader's float is on the same side of the bound.
"""

from dataclasses import dataclass
from decimal import Decimal

from eagle_train.errors import check
from eagle_train.inference.grammar.patterns import expect

_DIGITS = 15  # that a 64-bit float preserves
_WHOLE = "(0|[1-9][0-9]*)"
NUMBER = f"-?{_WHOLE}([.][0-9]+)?([eE][+-]?[0-9]{{1,2}})?"
_MOST_DIGITS = 40  # of a bound before the point


@dataclass(frozen=True)
class Bound:
    """A bound of a range."""

    value: Decimal
    strict: bool = False  # the value itself is excluded


def integers(least: int | None, most: int | None) -> str:
    """An expression for the integers from `least` to `most`; None: unbounded. There must be one."""
    options = []
    if least is None or least < 0:
        low = 1 if most is None or most >= 0 else -most
        options.append("-" + _naturals(low, None if least is None else -least))
    if most is None or most >= 0:
        options.append(_naturals(max(least or 0, 0), most))
    return _either(options)


def _naturals(least: int, most: int | None) -> str:
    """As `integers`, of non-negative bounds."""
    if most is None:
        digits = len(str(least))
        longer = f"[1-9][0-9]{{{digits},}}"
        same = _same_length(str(least), "9" * digits)
        return _WHOLE if least == 0 else _either([same, longer])
    options = []
    for digits in range(len(str(least)), len(str(most)) + 1):
        low = max(least, 10 ** (digits - 1) if digits > 1 else 0)
        options.append(_same_length(str(low), str(min(most, 10**digits - 1))))
    return _either(options)


def _same_length(low: str, high: str) -> str:
    """Digit strings between two of the same length."""
    if low == high:
        return low
    if set(low) == {"0"} and set(high) == {"9"}:
        return _digits(len(low), len(low))
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _same_length(low[1:], high[1:])
    rest = len(low) - 1
    options = []
    if rest and set(low[1:]) != {"0"}:
        options.append(f"{first}{_same_length(low[1:], '9' * rest)}")
        first += 1
    upper = f"{last}{_same_length('0' * rest, high[1:])}" if rest and set(high[1:]) != {"9"} else ""
    last -= bool(upper)
    if first <= last:
        options.append(f"[{first}-{last}]{_digits(rest, rest)}")
    return _either(options + ([upper] if upper else []))


def decimals(least: Bound | None, most: Bound | None) -> str:
    """Numbers between bounds, at least one of which is given. Raises UserError where there are none."""
    for bound in (least, most):
        if bound is not None:
            _, digits, exponent = bound.value.normalize().as_tuple()
            assert isinstance(exponent, int)  # a bound is finite
            long = len(digits) > _DIGITS or -exponent > _DIGITS or bound.value.adjusted() >= _MOST_DIGITS
            check(not long, f"a bound of more than {_DIGITS} significant digits cannot be guaranteed")
    zero = Bound(Decimal(0), strict=True)
    options = []
    if least is None or least.value < 0:
        low = _flipped(most) if most is not None and most.value < 0 else zero
        options += ["-" + text for text in _positive(low, None if least is None else _flipped(least))]
    if most is None or most.value > 0 or (most.value == 0 and not most.strict):
        low = least if least is not None and least.value >= 0 else Bound(Decimal(0))
        options += _positive(low, most)
    expect(bool(options), "no number is between these bounds")
    return _either(options)


def _flipped(bound: Bound) -> Bound:
    return Bound(-bound.value, bound.strict)


def _positive(least: Bound, most: Bound | None) -> list[str]:
    """Non-negative numbers: those with the whole part of either bound, and those between."""
    if most is not None and (least.value > most.value or (least.value == most.value and (least.strict or most.strict))):
        return []
    low, low_digits = _parts(least)
    if most is None:
        room = max(_DIGITS - len(str(low)), len(low_digits))
        return _with_fraction(str(low), _Fraction(low_digits, least.strict), room) + _between(low + 1, None, room)
    high, high_digits = _parts(most)
    room = max(_DIGITS - len(str(high)), len(low_digits), len(high_digits))
    if low == high:
        return _with_fraction(str(low), _Fraction(low_digits, least.strict, high_digits, most.strict), room)
    options = _with_fraction(str(low), _Fraction(low_digits, least.strict), room) + _between(low + 1, high - 1, room)
    return options + _with_fraction(str(high), _Fraction("", False, high_digits, most.strict), room)


def _between(least: int, most: int | None, room: int) -> list[str]:
    """Numbers with a whole part from `least` to `most` and any fraction of up to `room` digits."""
    if most is not None and least > most:
        return []
    return [_naturals(least, most) + (f"([.]{_digits(1, room)})?" if room else "")]


def _parts(bound: Bound) -> tuple[int, str]:
    """The whole part and the digits after the point, without zeros at the end."""
    whole = int(bound.value)
    return whole, f"{bound.value - whole:f}".partition(".")[2].rstrip("0")


@dataclass(frozen=True)
class _Fraction:
    """A range of digits after the point; `high` None: up to all nines. A strict bound is excluded."""

    low: str
    low_strict: bool
    high: str | None = None
    high_strict: bool = False


def _with_fraction(whole: str, fraction: _Fraction, room: int) -> list[str]:
    digits = _fraction(fraction, room)
    options = [f"{whole}[.]{digits}"] if digits else []
    alone = not (fraction.low or fraction.low_strict) and not (fraction.high == "" and fraction.high_strict)
    return ([whole] if alone else []) + options


def _fraction(fraction: _Fraction, room: int) -> str:
    """An expression for 1 to `room` digits of the range; "" where there are none."""
    if room == 0:
        return ""
    low, high = fraction.low, fraction.high
    first = int(low[:1] or 0)
    last = 9 if high is None else int(high[:1] or 0)
    options = []
    middle = list(range(first + 1, last))
    if middle:
        options.append(f"[{middle[0]}-{middle[-1]}]{_digits(0, room - 1)}")
    for digit in dict.fromkeys((first, last)):
        if first > last:
            break
        below = _Fraction(
            low[1:] if digit == first else "",
            fraction.low_strict and digit == first,
            (high[1:] if digit == last else None) if high is not None else None,
            fraction.high_strict and digit == last,
        )
        options += _digit_then(digit, below, room - 1)
    return _either(options) if options else ""


def _digit_then(digit: int, below: _Fraction, room: int) -> list[str]:
    """Expressions for a digit followed by digits of the range `below`, or by none where the range allows it."""
    free = not below.low and not below.low_strict and below.high is None
    if free:
        return [f"{digit}{_digits(0, room)}"]
    is_end = not below.low and not below.low_strict and not (below.high == "" and below.high_strict)
    only_zeros = below.high == "" and not below.high_strict and is_end
    if only_zeros:
        return [f"{digit}0{{0,{room}}}"]
    rest = "" if below.high == "" else _fraction(below, room)
    return ([str(digit)] if is_end else []) + ([f"{digit}{rest}"] if rest else [])


def _digits(least: int, most: int) -> str:
    if most == 0:
        return ""
    return "[0-9]" if least == most == 1 else f"[0-9]{{{least},{most}}}"


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({'|'.join(options)})"


def multiples(of: int) -> list[list[int]]:
    """The automaton of divisibility by `of`: for each remainder so far, the remainder after each further digit."""
    return [[(remainder * 10 + digit) % of for digit in range(10)] for remainder in range(of)]
