"""An explanation in words, on one screen; and as data for `--json`."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from zerofx.cli.units import counted, show_bytes, show_rate, show_seconds
from zerofx.debug.captured import UNCOMPILED, Break, Captured, Recompile
from zerofx.debug.changes import Change, Search
from zerofx.debug.decisions import Why
from zerofx.debug.explanation import Explanation
from zerofx.debug.outcome import CollectiveTime
from zerofx.passes.quantize_reduces import QuantizeReduces
from zerofx.passes.quantize_unshards import QuantizeUnshards

_WIDTH = 100
_MOST_ROWS = 6
_MOST_NAME = {False: 62, True: 44}  # beside the columns of bytes, which are three more on wires
_MOST_PLACES = 4


def as_text(found: Explanation) -> list[str]:
    """The screen, in paragraphs."""
    parts = [
        _head(found),
        _captured(found.captured),
        _step(found),
        _collectives(found.collectives),
        _changes(found.search) if found.search is not None else (),
    ]
    return [text for part in parts if (text := "\n".join(part))]


def why_text(found: Sequence[Why]) -> str:
    """Why nodes stand where they do."""
    lines: list[str] = []
    for each in found:
        lines += [f"{each.region}, line {each.place[0]} of {each.place[1]}", f"  {each.line}"]
        for decision in each.decisions:
            sign = "+" if decision.taken else "–"
            lines.append(f"  {sign} {decision.by:<15} {decision.text}")
        lines.append("")
    return "\n".join([*lines, "+ what a pass did   – what it did not do, and why"])


def why_data(found: Sequence[Why]) -> list[dict[str, Any]]:
    """The same as data."""
    return [dataclasses.asdict(each) for each in found]


def as_data(found: Explanation) -> dict[str, Any]:
    """Everything on the screen, and the rest of the collectives: bytes and seconds."""
    setting, machine, outcome = found.setting, found.setting.machine, found.outcome
    return {
        "name": found.name,
        "stage": setting.config.stage,
        "world_size": setting.num_ranks,
        "device": machine.device,
        "link_bytes_per_second": machine.link.bytes_per_second,
        "latency_seconds": machine.link.latency,
        "captured": dataclasses.asdict(found.captured),
        "step_seconds": outcome.times.step,
        **{f"{name}_seconds": value for name, value in dataclasses.asdict(outcome.times).items()},
        "measured": dataclasses.asdict(found.measured) if found.measured else None,
        "peak_bytes": outcome.peak.total,
        "peak": dataclasses.asdict(outcome.peak),
        "sent_bytes": outcome.sent_bytes,
        "collectives": [
            {**dataclasses.asdict(each), "hidden": each.hidden} for each in found.collectives
        ],
        **(_search_data(found.search) if found.search is not None else {}),
    }


def _search_data(found: Search) -> dict[str, Any]:
    return {
        "changes": [_change_data(each) for each in found.best],
        "changes_tried": found.tried,
        "changes_untried": dict(found.untried),
    }


def _change_data(change: Change) -> dict[str, Any]:
    return {
        "option": change.option,
        "value": change.value,
        "step_seconds": change.seconds,
        "peak_bytes": change.outcome.peak.total,
        "time_gain": change.time_gain,
        "memory_gain": change.memory_gain,
    }


def _head(found: Explanation) -> Iterator[str]:
    setting = found.setting
    config, machine = setting.config, setting.machine
    link, ranks = machine.link, counted(setting.num_ranks, "rank")
    yield (
        f"{found.name}: zero{config.stage} on {ranks} ({machine.device}), "
        f"link {show_rate(link.bytes_per_second)} and {show_seconds(link.latency)}, "
        f"inner compiler {config.inner}"
    )


def _captured(found: Captured) -> Iterator[str]:
    plain = found.graphs - found.training
    yield _row(
        "captured",
        f"{counted(found.graphs, 'graph')} of {counted(found.num_ops, 'operation')}"
        + (f" ({plain} that train nothing)" if plain else "")
        + f", {counted(len(found.breaks), 'graph break')}, "
        + counted(len(found.recompiles), "recompile"),
    )
    for each in found.breaks[:_MOST_PLACES]:
        yield from _place("break", each)
    if any(UNCOMPILED in each.reason for each in found.breaks):
        yield _row(
            "  missing",
            "what runs outside of graphs, and gathers parameters one by one, is not predicted",
        )
    for each in found.recompiles[:_MOST_PLACES]:
        yield from _place("recompile", each)
    more = sum(max(0, len(p) - _MOST_PLACES) for p in (found.breaks, found.recompiles))
    if more:
        yield _row("", f"… and {more} more: --json lists them")
    if found.left_out:
        yield from _wrapped("left out", found.left_out)
    if found.stopped:
        yield from _wrapped(
            "stopped", f"behind the last graph Python wants more than shapes: {found.stopped}"
        )


def _place(what: str, each: Break | Recompile) -> Iterator[str]:
    yield _row(f"  {what}", f"{each.place}:  {each.place.code}")
    yield from _wrapped("", each.reason)
    yield from _wrapped("", f"Remedy: {each.remedy}")


def _step(found: Explanation) -> Iterator[str]:
    times, peak, measured = found.outcome.times, found.outcome.peak, found.measured
    yield _row(
        "step",
        f"predicted {show_seconds(times.step)}: compute {show_seconds(times.compute)}, "
        f"exposed communication {show_seconds(times.exposed)}, "
        f"optimizer {show_seconds(times.update)}"
        + (f", Python and shared cores {show_seconds(times.host)}" if times.host else ""),
    )
    if measured is not None:
        yield _row("", _measured(found))
    room = found.setting.memory_bytes
    fits = "" if room is None else ("; it fits into " if peak.total <= room else "; too much for ")
    yield _row(
        "peak",
        f"predicted {show_bytes(peak.total)} in {peak.phase}"
        + (f"{fits}{show_bytes(room)}" if room is not None else ""),
    )
    parts = {
        "parameters": peak.params,
        "gradients": peak.grads,
        "optimizer": peak.optimizer,
        "activations": peak.activations,
        "in flight": peak.gathered + peak.messages,
    }
    yield _row("", ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items()))
    if measured is not None and measured.peak_bytes is not None:
        yield _row("", f"measured {show_bytes(measured.peak_bytes)} (CUDA's allocator)")
    for label, text in _weighed(found):
        yield _row(label, text)
    number = found.outcome.num_collectives
    mean = found.outcome.sent_bytes / max(1, number)
    yield _row(
        "sent",
        f"{show_bytes(found.outcome.sent_bytes)} a step by each rank, in "
        f"{counted(number, 'collective')} of {show_bytes(mean)} on average",
    )


def _weighed(found: Explanation) -> Iterator[tuple[str, str]]:
    """What `quantize="auto"` came to, for each graph."""
    named = {QuantizeUnshards.name: "weights", QuantizeReduces.name: "gradients"}
    for region, report in found.reports.items():
        for each in report["passes"]:
            weighed = (each["plan"] or {}).get("weighed") if each["name"] in named else None
            # Weights are listed in backward too, with the same figures.
            if weighed and ("forward" in region) == (each["name"] == QuantizeUnshards.name):
                chosen = "codes" if weighed["pays"] else "numbers"
                yield (
                    "auto",
                    f"{named[each['name']]} travel as {chosen}: the graph takes "
                    f"{show_seconds(weighed['exact'])} with numbers, "
                    f"{show_seconds(weighed['coded'])} with codes",
                )


def _measured(found: Explanation) -> str:
    measured, ranks = found.measured, found.setting.num_ranks
    assert measured is not None
    compiled = f"compilations {show_seconds(measured.compile_seconds)}"
    if measured.step is None:
        return f"not measured: fewer than two steps behind compilations; {compiled}"
    where = "" if measured.num_ranks == ranks else f" on {counted(measured.num_ranks, 'rank')} here"
    return (
        f"measured {show_seconds(measured.step)}{where}, from one optimizer step to the next, "
        f"median of {measured.steps}; {compiled}"
    )


def _collectives(found: Sequence[CollectiveTime]) -> Iterator[str]:
    if not found:
        yield "no collectives"
        return
    worst = sorted(found, key=lambda each: -each.exposed)
    shown, rest = worst[:_MOST_ROWS], worst[_MOST_ROWS:]
    wires = any(each.scale_bytes or each.across_bytes for each in found)
    names = [_named(each, _MOST_NAME[wires]) for each in shown]
    width = max(map(len, ("collective", *names)))
    more = f" {'scales':>8} {'inside':>8} {'across':>8}" if wires else ""
    yield f"{'collective':<{width}}  {'in':<8} {'sends':>8}{more} {'hidden':>8} {'exposed':>8}" + (
        "  as" if wires else ""
    )
    for name, each in zip(names, shown, strict=True):
        yield _collective(name.ljust(width), each.region, [each], wires)
    if rest:
        yield _collective(counted(len(rest), "other").ljust(width), "", rest, wires)
    yield _collective("all".ljust(width), "", found, wires)
    if wires:
        yield "inside and across a rank's node, if messages take two hops; scales are part of sends"


def _named(found: CollectiveTime, most: int) -> str:
    """Its name, whole if it fits, and how often it runs."""
    often = "" if found.runs == 1 else f" ×{found.runs:.3g}"
    room = most - len(often)
    return (found.name if len(found.name) <= room else f"{found.name[: room - 1]}…") + often


def _collective(name: str, region: str, found: Sequence[CollectiveTime], wires: bool) -> str:
    """A row; with `wires` also what is sent, and where to."""
    total, more, dtype = sum(each.wire_bytes for each in found), "", ""
    if wires:
        across = sum(each.across_bytes for each in found)
        sizes = (sum(each.scale_bytes for each in found), total - across, across)
        more = "".join(f" {show_bytes(size):>8}" for size in sizes)
        dtype = "  " + ", ".join(dict.fromkeys(each.wire_dtype for each in found))
    hidden, exposed = (
        show_seconds(sum(values))
        for values in ([each.hidden for each in found], [each.exposed for each in found])
    )
    return f"{name}  {region:<8} {show_bytes(total):>8}{more} {hidden:>8} {exposed:>8}{dtype}"


def _changes(found: Search) -> Iterator[str]:
    tried = counted(found.tried, "change") + " of one option"
    if not found.best:
        yield f"No change helps: {tried} were planned, and none saves 1 % of the step."
    else:
        yield f"What would help most, of {tried} that were planned:"
    for number, each in enumerate(found.best, 1):
        yield (
            f"  {number}. {each.option}={each.value}: {_gain('step', each.time_gain)} to "
            f"{show_seconds(each.seconds)}"
            + (" for as many samples" if each.option == "micro-batch" else "")
            + f", {_gain('peak', each.memory_gain)} to {show_bytes(each.outcome.peak.total)}"
        )
    for option, reason in found.untried:
        yield f"  not tried: {option}: {reason}"


def _gain(what: str, gain: float) -> str:
    percent = round(100 * gain)
    return f"{what} {'±' if percent == 0 else '−' if percent > 0 else '+'}{abs(percent)} %"


def _row(label: str, text: str) -> str:
    return f"{label:<11} {text}".rstrip()


def _wrapped(label: str, text: str) -> Iterator[str]:
    for place, line in enumerate(textwrap.wrap(text, _WIDTH - 14)):
        yield _row("" if place else label, ("  " if place else "") + line)
