"""JSON Schema's formats as regular expressions, by the standards that it refers to.

Where a standard's rule needs too large an expression (the length of a host name besides those of its labels), the
expression matches most of the valid texts, and never an invalid one. Knows nothing of schemas.
"""

from eagle_train.inference.grammar.numbers import integers


def _leap(years: str) -> str:
    """Two digits divisible by 4, without 00, then `years`."""
    return f"(0[48]|[2468][048]|[13579][26]){years}"


_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"  # 0000 is a year to RFC 3339 and none to most libraries
_LEAP_YEAR = f"([0-9]{{2}}{_leap('')}|{_leap('00')})"  # 4 divides it and, at a century's end, 400 too
_DAY = "(0[1-9]|1[0-9]|2[0-8])"  # of any month
_DATE = f"({_YEAR}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
_HOUR, _SIXTY = "([01][0-9]|2[0-3])", "[0-5][0-9]"
# RFC 3339, without leap seconds: a format cannot say which minutes have one.
_TIME = f"{_HOUR}:{_SIXTY}:{_SIXTY}([.][0-9]{{1,9}})?(Z|[+-]{_HOUR}:{_SIXTY})"


def _duration() -> str:
    """RFC 3339, appendix A: units follow on one another without a gap, and weeks stand alone."""
    number = "[0-9]{1,9}"
    minute = f"{number}M({number}S)?"
    time = f"T({number}H({minute})?|{minute}|{number}S)"
    month = f"{number}M({number}D)?"
    date = f"({number}Y({month})?|{month}|{number}D)"
    return f"P({date}({time})?|{time}|{number}W)"


_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}([.]{_OCTET}){{3}}"


def _ipv6() -> str:
    """RFC 4291: eight groups, of which `::` stands for one or more; the last two may be an IPv4 address."""
    group = "[0-9A-Fa-f]{1,4}"
    last = f"({group}:{group}|{_IPV4})"
    options = [f"({group}:){{6}}{last}"]
    for before in range(6):  # groups that may stand before `::`
        front = f"({group}(:{group}){{0,{before - 1}}})?" if before else ""
        options.append(f"{front}::({group}:){{{5 - before}}}{last}")
    options += [f"({group}(:{group}){{0,{before}}})?::{after}" for before, after in ((5, group), (6, ""))]
    return f"({'|'.join(options)})"


_IPV6 = _ipv6()


_PART, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"


def _label(longest: int, first: str = _PART) -> str:
    """A label of a host name, 1 to `longest` characters: letters, digits and hyphens, no hyphen at an end, nor two in
    the third and fourth place, where they announce an internationalised name (xn--).
    """
    long = f"({_PART}{_INNER}|-{_PART}){_INNER}{{0,{longest - 5}}}{_PART}"
    return f"{first}({_PART}|{_INNER}({_PART}|{_INNER}{_PART}|{long}))?"


def _host(*families: tuple[int, int]) -> str:
    """A host name of some labels, each pair: how many at most, and how long. The last one begins with a letter, else it
    may be an address.
    """
    options = [f"({_label(longest)}[.]){{0,{count - 1}}}{_label(longest, '[A-Za-z]')}" for count, longest in families]
    return f"({'|'.join(options)})"


_HOSTNAME = _host((3, 63), (7, 31))  # 253 characters at most
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"  # RFC 5321; quoted and internationalised local parts are left out
_LOCAL = f"({_ATOM}{{1,64}}|{_ATOM}{{1,20}}([.]{_ATOM}{{1,20}}){{1,2}}|{_ATOM}{{1,9}}([.]{_ATOM}{{1,9}}){{3,5}})"
_EMAIL = f"{_LOCAL}@{_host((5, 31))}"  # 254 characters at most, 64 of them before the @
_HEX = "[0-9A-Fa-f]"
_UUID = f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"

_ENCODED = f"%{_HEX}{{2}}"
_UNRESERVED, _SUB_DELIMITERS = "A-Za-z0-9._~-", "!$&'()*+,;="
_PCHAR = f"([:@{_SUB_DELIMITERS}{_UNRESERVED}]|{_ENCODED})"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
_AUTHORITY = (
    f"(([:{_SUB_DELIMITERS}{_UNRESERVED}]|{_ENCODED})*@)?"
    rf"(\[{_IPV6}\]|([{_SUB_DELIMITERS}{_UNRESERVED}]|{_ENCODED})*)(:({integers(0, 65535)})?)?"
)
_ROOTLESS = f"{_PCHAR}+(/{_PCHAR}*)*"
_ABSOLUTE = f"/({_ROOTLESS})?"
_NETWORK = f"//{_AUTHORITY}(/{_PCHAR}*)*"
_NO_SCHEME = f"([@{_SUB_DELIMITERS}{_UNRESERVED}]|{_ENCODED})+(/{_PCHAR}*)*"
_AFTER_PATH = f"([?]({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?"
_URI = f"{_SCHEME}:({_NETWORK}|{_ABSOLUTE}|{_ROOTLESS}|){_AFTER_PATH}"
_RELATIVE = f"({_NETWORK}|{_ABSOLUTE}|{_NO_SCHEME}|){_AFTER_PATH}"
# RFC 6570
_LITERAL = rf"([!#$&(-;=?-\[\]_a-z~\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef]|{_ENCODED})"
_VARIABLE = f"([A-Za-z0-9_]|{_ENCODED})([.]?([A-Za-z0-9_]|{_ENCODED}))*(:[1-9][0-9]{{0,3}}|[*])?"
_TEMPLATE = rf"({_LITERAL}|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*"

_POINTER = r"(/([^~/]|~[01])*)*"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _duration(),
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "uri": _URI,
    "uri-reference": f"({_URI}|{_RELATIVE})",
    "uri-template": _TEMPLATE,
    "uuid": _UUID,
}
