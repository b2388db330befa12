"""JSON Schema's formats as regular expressions, as strict as the standards that it names.

Where a standard has rules that a regular expression of sane size cannot keep (the length of a whole host name beside
those of its labels), the expression describes most of the valid texts and none that is invalid. Knows nothing of
schemas.
"""

from eagle_train.inference.grammar.numbers import integers


def _leap(years: str) -> str:
    """The two-digit numbers that four divides, without 00."""
    return f"(0[48]|[2468][048]|[13579][26]){years}"


YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"  # 0000 is a year to RFC 3339 and none to most libraries
LEAP_YEAR = f"([0-9]{{2}}{_leap('')}|{_leap('00')})"  # 4 divides it and, at a century's end, 400 too
DAY = "(0[1-9]|1[0-9]|2[0-8])"  # of any month
DATE = f"({YEAR}-((0[1-9]|1[0-2])-{DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{LEAP_YEAR}-02-29)"
HOUR, SIXTY = "([01][0-9]|2[0-3])", "[0-5][0-9]"
# RFC 3339, without leap seconds: which minutes have one is no matter of form.
TIME = f"{HOUR}:{SIXTY}:{SIXTY}([.][0-9]{{1,9}})?(Z|[+-]{HOUR}:{SIXTY})"


def _duration() -> str:
    """RFC 3339, appendix A: units follow on one another without a gap, and weeks stand alone."""
    number = "[0-9]{1,9}"
    minute = f"{number}M({number}S)?"
    time = f"T({number}H({minute})?|{minute}|{number}S)"
    month = f"{number}M({number}D)?"
    date = f"({number}Y({month})?|{month}|{number}D)"
    return f"P({date}({time})?|{time}|{number}W)"


OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"{OCTET}([.]{OCTET}){{3}}"


def _ipv6() -> str:
    """RFC 4291: eight groups, of which `::` stands for one or more; the last two may be an IPv4 address."""
    group = "[0-9A-Fa-f]{1,4}"
    last = f"({group}:{group}|{IPV4})"
    options = [f"({group}:){{6}}{last}"]
    for before in range(6):  # groups that may stand before `::`
        front = f"({group}(:{group}){{0,{before - 1}}})?" if before else ""
        options.append(f"{front}::({group}:){{{5 - before}}}{last}")
    options += [f"({group}(:{group}){{0,{before}}})?::{after}" for before, after in ((5, group), (6, ""))]
    return f"({'|'.join(options)})"


IPV6 = _ipv6()


PART, INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"


def _label(longest: int, first: str = PART) -> str:
    """A label of a host name, 1 to `longest` characters: letters, digits and hyphens, no hyphen at an end, nor two in
    the third and fourth place, where they announce an internationalised name (xn--).
    """
    long = f"({PART}{INNER}|-{PART}){INNER}{{0,{longest - 5}}}{PART}"
    return f"{first}({PART}|{INNER}({PART}|{INNER}{PART}|{long}))?"


def _host(*families: tuple[int, int]) -> str:
    """A host name of some labels, each pair: how many at most, and how long. The last one begins with a letter, else it
    may be an address.
    """
    options = [f"({_label(longest)}[.]){{0,{count - 1}}}{_label(longest, '[A-Za-z]')}" for count, longest in families]
    return f"({'|'.join(options)})"


HOSTNAME = _host((3, 63), (7, 31))  # 253 characters at most
ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"  # RFC 5321; quoted and internationalised local parts are left out
LOCAL = f"({ATOM}{{1,64}}|{ATOM}{{1,20}}([.]{ATOM}{{1,20}}){{1,2}}|{ATOM}{{1,9}}([.]{ATOM}{{1,9}}){{3,5}})"
EMAIL = f"{LOCAL}@{_host((5, 31))}"  # 254 characters at most, 64 of them before the @
HEX = "[0-9A-Fa-f]"
UUID = f"{HEX}{{8}}(-{HEX}{{4}}){{3}}-{HEX}{{12}}"

ENCODED = f"%{HEX}{{2}}"
UNRESERVED, SUB_DELIMITERS = "A-Za-z0-9._~-", "!$&'()*+,;="
PCHAR = f"([:@{SUB_DELIMITERS}{UNRESERVED}]|{ENCODED})"
SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
AUTHORITY = (
    f"(([:{SUB_DELIMITERS}{UNRESERVED}]|{ENCODED})*@)?"
    rf"(\[{IPV6}\]|([{SUB_DELIMITERS}{UNRESERVED}]|{ENCODED})*)(:({integers(0, 65535)})?)?"
)
ROOTLESS = f"{PCHAR}+(/{PCHAR}*)*"
ABSOLUTE = f"/({ROOTLESS})?"
NETWORK = f"//{AUTHORITY}(/{PCHAR}*)*"
NO_SCHEME = f"([@{SUB_DELIMITERS}{UNRESERVED}]|{ENCODED})+(/{PCHAR}*)*"
AFTER_PATH = f"([?]({PCHAR}|[/?])*)?(#({PCHAR}|[/?])*)?"
URI = f"{SCHEME}:({NETWORK}|{ABSOLUTE}|{ROOTLESS}|){AFTER_PATH}"
RELATIVE = f"({NETWORK}|{ABSOLUTE}|{NO_SCHEME}|){AFTER_PATH}"
# RFC 6570
LITERAL = rf"([!#$&(-;=?-\[\]_a-z~\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef]|{ENCODED})"
VARIABLE = f"([A-Za-z0-9_]|{ENCODED})([.]?([A-Za-z0-9_]|{ENCODED}))*(:[1-9][0-9]{{0,3}}|[*])?"
TEMPLATE = rf"({LITERAL}|\{{[+#./;?&]?{VARIABLE}(,{VARIABLE})*\}})*"

POINTER = r"(/([^~/]|~[01])*)*"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": _duration(),
    "email": EMAIL,
    "hostname": HOSTNAME,
    "ipv4": IPV4,
    "ipv6": IPV6,
    "json-pointer": POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{POINTER})",
    "uri": URI,
    "uri-reference": f"({URI}|{RELATIVE})",
    "uri-template": TEMPLATE,
    "uuid": UUID,
}
