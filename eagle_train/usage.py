"""What `--help` prints: a command's groups and keys, from its YAMLs and the dataclasses that these stand for.

Knows nothing of what the keys do.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from eagle_train.fields import FIELDS, Field, fields_of

HOW = """\
Usage: {program} [KEY=VALUE ...]

A value with commas, blanks or brackets is quoted for the shell: 'KEY=[a, b]'. ??? must be given; null stands for none.
<KEY> stands for the value of KEY. --cfg job prints the config with the values that were given, and ends."""
OTHERS = "GROUP=OPTION --help shows the keys of another option."

_GROUP = re.compile(r"^  - (?:override )?/(\w+): (\w+)", re.MULTILINE)
_SELF = "\n  - _self_\n"
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,(\w+))?\}")
_PACKAGE = "# @package _global_\n"
_BASES = re.compile(r"^defaults: \[(.*)\]$", re.MULTILINE)
_KEY = re.compile(r"^(\s*)([\w.]+):(?: +|$)(.*)$")

Entries = dict[str, list[str]]
"""The lines of each key at a YAML's top level, those of what is below it included."""


def usage(conf: Path, name: str, also: Mapping[str, str], given: Mapping[str, str] | None = None) -> str:
    """A command's help, from `conf`/commands/`name`.yaml. `also`: what a group takes besides its YAMLs. `given`: the
    options that were chosen in the place of others."""
    given = given or {}
    text = (conf / "commands" / f"{name}.yaml").read_text("utf-8").removeprefix(_PACKAGE)
    about, own = _about(text), _entries(text)
    last = _chosen(text.partition(_SELF)[2])  # whose values take the place of the command's
    chosen = _chosen(text)
    for group in last:
        path = conf / group / f"{given.get(group, chosen[group])}.yaml"
        chosen |= _chosen(path.read_text("utf-8")) if path.is_file() else {}
    chosen |= {group: option for group, option in given.items() if group in chosen}
    for group, option in list(chosen.items()):
        if not _is_shared(conf / group / f"{option}.yaml"):
            continue
        shared = _merged(conf / group, option)
        if group in last:
            _overlay(own, shared)
        else:  # keys that commands share, and nothing to choose
            _overlay(shared, own)
            own = shared
            del chosen[group]
    groups: list[str] = []
    keys: list[str] = []
    for group, option in chosen.items():
        options = sorted(path.stem for path in (conf / group).glob("*.yaml") if path.stem != "base")
        choice = "; ".join([", ".join(options), *([also[group]] if group in also else [])])
        if option != FIELDS:
            groups.append(f"  {f'{group}={option}':<20} {choice}")
        has_keys = option in (*options, FIELDS) and not _is_shared(conf / group / f"{option}.yaml")
        entries = _merged(conf / group, option) if has_keys else {}
        _overlay(entries, _below(own.pop(group, [])))
        keys += [line for lines in entries.values() for line in _dotted(lines, f"{group}.")]
    keys += [line for lines in own.values() for line in _dotted(lines)]
    known = {line.split("=")[0].strip() for line in keys}
    keys = [_in_words(line, known) if "${" in line else line for line in keys]
    parts = [about, HOW.format(program=about.partition(":")[0])]
    if groups:
        parts.append("\n".join(["Configuration groups, GROUP=OPTION, and what there is of each:", *groups]))
    parts.append("\n".join(["Keys, with their values where nothing is given:", *keys]))
    return "\n\n".join([*parts, *([OTHERS] if groups else [])])


def _chosen(text: str) -> dict[str, str]:
    """The option of each group in the defaults list of a YAML's text."""
    return dict(_GROUP.findall(text))


def _in_words(line: str, known: set[str]) -> str:
    """A key's line, where its value names other keys: each as <KEY>, or what stands for one that is not `known`."""
    given, mark, comment = line.partition(" # ")
    given = _REFERENCE.sub(lambda m: f"<{m[1]}>" if m[1] in known or m[2] is None else m[2], given).rstrip()
    return f"{given:<36}{mark}{comment}" if mark else given


def _is_shared(path: Path) -> bool:
    return path.is_file() and path.read_text("utf-8").startswith(_PACKAGE)


def _about(text: str) -> str:
    """The comment at a YAML's head."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("# "):
            break
        lines.append(line[2:])
    return "\n".join(lines)


def _merged(group: Path, option: str) -> Entries:
    """The keys of a group's option and, before them, those of the options that its YAML begins with."""
    if option.startswith(FIELDS):
        return {each.name: _lines_of(each) for each in fields_of(group.name, option)}
    text = (group / f"{option}.yaml").read_text("utf-8")
    entries: Entries = {}
    found = _BASES.search(text)
    for base in found[1].split(", ") if found else []:
        if base != "_self_":
            _overlay(entries, _merged(*_place(group, base)))
    _overlay(entries, _entries(text))
    return entries


def _place(group: Path, base: str) -> tuple[Path, str]:
    """The group and the option of what a YAML of `group` begins with: an option of its own, or /GROUP/OPTION."""
    other, _, option = base.removeprefix("/").rpartition("/")
    return (group.parent / other if other else group), option


def _lines_of(field: Field) -> list[str]:
    """A dataclass's field as a YAML would have it."""
    return [f"{field.name}: {field.text}" + (f" # {field.comment}" if field.comment else "")]


def _overlay(entries: Entries, more: Entries) -> None:
    """Put values in the place of others; where nothing is said of one, what was said before stays. Mappings merge."""
    for key, lines in more.items():
        if min(len(lines), len(entries.get(key, []))) > 1:
            below = _below(entries[key])
            _overlay(below, _below(lines))
            entries[key] = [lines[0], *(f"  {line}" for inner in below.values() for line in inner)]
            continue
        said = entries.get(key, [""])[0].partition(" #")[2]
        entries[key] = [f"{lines[0]} #{said}"] if said and len(lines) == 1 and " #" not in lines[0] else lines


def _below(lines: list[str]) -> Entries:
    """The keys of a mapping, from its lines."""
    return _entries("\n".join(line.removeprefix("  ") for line in lines[1:]))


def _entries(text: str) -> Entries:
    """A YAML's keys, `defaults` left out."""
    found: Entries = {}
    key = "defaults"
    for line in text.splitlines():
        if (start := _KEY.match(line)) and not start[1]:
            key = start[2]
        if line.strip() and key != "defaults":
            found.setdefault(key, []).append(line)
    return found


def _dotted(lines: list[str], above: str = "") -> Iterator[str]:
    """The lines of a key as overrides: what is below others with their names before its own."""
    path: list[tuple[int, str]] = []
    for line in lines:
        found = _KEY.match(line)
        if not found:  # a comment's or a list's next line
            yield f"      {line.strip()}"
            continue
        depth, name, rest = len(found[1]), found[2], found[3]
        path = [*(step for step in path if step[0] < depth), (depth, name)]
        value, mark, comment = rest.partition("#") if rest.startswith("#") else rest.partition(" #")
        key = above + ".".join(step for _, step in path)
        given = f"{key}={value.strip()}" if value.strip() else f"{key}:"
        if mark:
            yield f"  {given:<34} # {comment.strip()}"
        elif value.strip():
            yield f"  {given}"
