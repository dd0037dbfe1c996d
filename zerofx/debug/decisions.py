"""Why a node stands where it does: what each pass decided about it, and what it decided against.

Reads entries of `report.json` alone, so that a dump can be asked as well as a live program.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from zerofx.errors import ConfigError
from zerofx.ir.text import diff
from zerofx.passes.schedule import Schedule

_MOST_NAMES = 20
_TOKEN = re.compile(r"[%\w.#–]+")
_CALLED = re.compile(r"(free|keep)\((?:full\.)?(.+?)(?:, |\)$|\)  #)")
_DONE, _NOT_DONE = ("kept: ", "codes: "), ("freed: ", "numbers: ")


@dataclasses.dataclass(frozen=True)
class Decision:
    """What one pass decided about a node.

    Attributes:
        by: the pass.
        taken: whether it did something; else it says why not.
        text: what, and why.
    """

    by: str
    taken: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Why:
    """A node of one program.

    Attributes:
        region: of the program.
        line: its last form, as it is printed.
        place: number of its line, from 1, and how many there are.
        decisions: in the order of the passes.
    """

    region: str
    line: str
    place: tuple[int, int]
    decisions: tuple[Decision, ...]


def why(
    name: str,
    texts: Mapping[str, Mapping[str, str]],
    reports: Mapping[str, Mapping[str, Any]],
) -> list[Why]:
    """What is known about a node, for each region that has it.

    Args:
        name: as the final program prints it, `unshard.layers.3`, or `backward:unshard.layers.3`.
        texts: by region, the program after each pass, in order.
        reports: by region, its entry of `report.json`.

    Raises:
        ConfigError: no program has such a node; the nearest names are shown.
    """
    # Names of modules may have colons, too.
    wanted = next((region for region in texts if name.startswith(f"{region}:")), "")
    node = name.removeprefix(f"{wanted}:")
    found: list[Why] = []
    known: list[str] = []
    for region, after in texts.items():
        if region not in reports:
            continue
        final = list(after.values())[-1]
        lines = [line for line in final.splitlines()[1:] if not line.startswith("  ")]
        names = _names_in(reports[region])
        known += [f"{region}:{each}" if wanted else each for each in names]
        if wanted in ("", region) and node in names:
            place = names.index(node)
            decided = tuple(_decisions(node, lines[place], after, reports[region]))
            found.append(Why(region, lines[place], (place + 1, len(lines)), decided))
    if not found:
        raise ConfigError(f"no program has a node {name!r}", _hint(name, known))
    return found


def _names_in(report: Mapping[str, Any]) -> list[str]:
    """Of the nodes of a finished program: its lines but for those of its outputs."""
    return [each["name"] for each in report["nodes"]]


def reasons_in(plan: Any) -> Iterator[tuple[str, str]]:
    """`(what, why)` of everything that a plan gives a reason for, decisions not taken included."""
    if isinstance(plan, Mapping):
        if isinstance(plan.get("reason"), str):
            yield (
                f"{plan.get('name', '')}: {', '.join(map(str, plan.get('starts', ())))}",
                str(plan["reason"]),
            )
        for key, value in plan.items():
            if key == "reasons":
                yield from ((str(what), str(reason)) for what, reason in value)
            else:
                yield from reasons_in(value)
    elif isinstance(plan, (list, tuple)):
        for each in plan:
            yield from reasons_in(each)


def _decisions(
    node: str, line: str, after: Mapping[str, str], report: Mapping[str, Any]
) -> Iterator[Decision]:
    about = _about(node, line, report)
    kind = node.partition(".")[0]
    before = ""
    names = frozenset(_names_in(report))
    by_name = {each["name"]: each["plan"] for each in report["passes"]}
    for name, text in after.items():
        plan = by_name.get(name)
        made = _has(node, text, names) and not _has(node, before, names)
        if made and before:
            yield Decision(name, True, "put it into the program")
        for what, reason in reasons_in(plan):
            if _concerns(what, node, about, kind):
                yield Decision(name, *_said(name, what, reason))
        if not made and before and (moved := _moved(node, before, text, names)):
            yield Decision(name, True, moved)
        before = text


def _said(by: str, what: str, reason: str) -> tuple[bool, str]:
    """A reason in words, and whether it is for something that was done."""
    if reason.startswith((*_DONE, *_NOT_DONE)):
        return reason.startswith(_DONE), reason
    if what.partition(":")[2]:
        bucket, _, starts = what.partition(": ")
        return True, f"bucket {bucket} of {starts.count(',') + 1}, which ends here because {reason}"
    return False, f"does not start earlier: {reason}" if by == Schedule.name else reason


def _concerns(what: str, node: str, about: set[str], kind: str) -> bool:
    """Whether a reason is about this node: by its name, or by a parameter of its kind."""
    named = set(re.split(": |, ", what))
    if node in named:
        return True
    prefixed = {f"{kind}.{param}" for param in about}
    # Full values and frees belong to gathers, gradients to reductions.
    side = {"full": "unshard", "free": "unshard", "keep": "unshard", "grad": "reduce"}.get(kind)
    if side is not None:
        prefixed |= {f"{side}.{param}" for param in about}
    bare = about if kind in ("unshard", "full", "free", "keep") else set[str]()
    return bool(named & (prefixed | bare))


def _about(node: str, line: str, report: Mapping[str, Any]) -> set[str]:
    """The parameters that a node is about."""
    kind, _, rest = node.partition(".")
    rest = re.sub(r"#\d+$", "", rest)
    for each in report["collectives"]:
        params = {member["param"] for member in each["members"]}
        if each["kind"] == kind and (each["bucket"] == rest or params == {rest}):
            return params
    return {rest} if rest else set(re.findall(r"param=(\S+)", line))


def _moved(node: str, before: str, after: str, names: Set[str]) -> str:
    """Between which lines a pass has put it."""
    changed = diff(before, after)
    lines = [line[1:] for line in changed.splitlines() if line.startswith("+")]
    if not any(_name_of(line, names) == node for line in lines):
        return ""
    all_lines = [_name_of(line, names) for line in after.splitlines()]
    following = next((name for name in all_lines[all_lines.index(node) + 1 :] if name), "the end")
    return f"put it before {following}"


def _has(node: str, text: str, names: Set[str]) -> bool:
    return any(_name_of(line, names) == node for line in text.splitlines())


def _name_of(line: str, names: Set[str]) -> str:
    """`full.w` of `full.w: f32[4] = …`; `free(full.w)` names what it frees: `free.w`.

    Args:
        line: of the program after any pass.
        names: in the finished program, where modules may be called anything.
    """
    head = line.partition(" = ")[0].partition("  #")[0].partition(": ")[0].strip()
    called = _CALLED.match(line)
    if called:
        return f"{called[1]}.{called[2]}"
    return head if head in names or (_TOKEN.fullmatch(head) and head != "return") else ""


def _hint(name: str, known: Sequence[str]) -> str:
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    starts = [each for each in known if "." in each][:_MOST_NAMES]
    return "--until schedule prints the program; nodes are named as " + ", ".join(starts)
