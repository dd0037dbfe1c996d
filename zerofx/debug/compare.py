"""What differs between two dumps, program by program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerofx.debug.reports import read_reports
from zerofx.errors import ConfigError
from zerofx.ir.text import diff
from zerofx.page.build import AFRESH, read_text

Program = Mapping[str, Any]
_COMPARABLE = "compare two dumps, two folders graph<N> of dumps, or two text files"
_COUNTS = {
    "wire_bytes": "bytes sent by a rank",
    "peak_full_bytes": "bytes of full values at once, at most",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """One program that differs.

    Attributes:
        where: its place in the dump: `graph0/forward`; empty for two files.
        findings: what differs, a sentence each.
        text: what changed in the text of the finished program, as a unified diff.
    """

    where: str
    findings: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        head = [f"{self.where}:"] if self.where else []
        return "\n".join([*head, *(f"  {each}" for each in self.findings), self.text]).rstrip()


def compare(one: Path, other: Path) -> list[Difference]:
    """Compare two dumps, two folders `graph<N>` of dumps, or two text files.

    Returns:
        The programs that differ, in order; empty if nothing does.

    Raises:
        ConfigError: a path holds no dump, or one that is damaged or of another version of zerofx;
            or one is a whole dump, and the other one graph.
    """
    if one.is_file() and other.is_file():
        text = diff(read_text(one, _COMPARABLE), read_text(other, _COMPARABLE))
        return [Difference("", (), text)] if text else []
    mine, theirs = _programs(one), _programs(other)
    if (one / "report.json").is_file() is not (other / "report.json").is_file():
        raise ConfigError(
            f"one of {one} and {other} is a whole dump, the other is not", _COMPARABLE
        )
    found: list[Difference] = []
    for where in dict.fromkeys((*mine, *theirs)):
        if where not in mine or where not in theirs:
            owner = one if where in mine else other
            found.append(Difference(where, (f"only in {owner}",), ""))
            continue
        findings = list(_findings(mine[where], theirs[where]))
        text = diff(mine[where]["text"], theirs[where]["text"])
        if text or findings:
            found.append(Difference(where, tuple(findings), text))
    return found


def _programs(root: Path) -> dict[str, dict[str, Any]]:
    """Reports of all programs below `root`, with their texts after each pass and at the end."""
    out: dict[str, dict[str, Any]] = {}
    for path, report in read_reports(root):
        for program in report["programs"]:
            folder = path.parent / program["region"]
            texts = sorted(folder.glob("[0-9][0-9][0-9]_*.txt"))
            if not texts:
                raise ConfigError(f"{folder} holds no program", "dump it again with this zerofx")
            stages = {text.stem[4:]: read_text(text, AFRESH) for text in texts}
            prefix = "" if path.parent == root else f"{path.parent.name}/"
            out[prefix + program["region"]] = {
                **program,
                "texts": stages,
                "text": list(stages.values())[-1],
            }
    return out


def _findings(one: Program, other: Program) -> Iterator[str]:
    yield from _passes(one, other)
    for kind, word in (("unshard", "gathers"), ("reduce", "reductions")):
        counts = [
            sum(each["kind"] == kind for each in program["collectives"]) for program in (one, other)
        ]
        if counts[0] != counts[1]:
            yield f"{counts[0]} → {counts[1]} {word}"
    for key, word in _COUNTS.items():
        if one[key] != other[key]:
            yield f"{one[key]} → {other[key]} {word}"
    for name in sorted({*one["kept"]} ^ {*other["kept"]}):
        yield f"{name} is {'not kept any more' if name in one['kept'] else 'kept until backward'}"


def _passes(one: Program, other: Program) -> Iterator[str]:
    mine, theirs = ({each["name"]: each for each in p["passes"]} for p in (one, other))
    for name in (name for name in mine if name not in theirs):
        yield f"pass {name} does not run any more"
    for name in (name for name in theirs if name not in mine):
        yield f"pass {name} runs in addition"
    both = [name for name in mine if name in theirs]
    if both != [name for name in theirs if name in mine]:
        yield f"passes run in another order: {', '.join(theirs)}"
    for name in both:
        before, after = mine[name]["options"], theirs[name]["options"]
        for key in dict.fromkeys((*before, *after)):
            if before.get(key) != after.get(key):
                yield f"pass {name}: {key} {before.get(key)} → {after.get(key)}"
    for name in ("traced", *both):
        if one["texts"].get(name) != other["texts"].get(name):
            yield f"the texts differ from {name} on"
            return
