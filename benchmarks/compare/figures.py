"""From outcomes to figures: medians over rounds, ratios, and whether losses agree."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.compare.contenders import CONTENDERS
from benchmarks.compare.trial import Outcome

FLOOR = "compute"


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the table says of one contender; None where nothing was measured.

    Attributes:
        contender: its name.
        failure: why there are no figures.
        step_ms: median over rounds.
        spread_ms: slowest round less fastest.
        per_second: tokens or images of all ranks.
        exposed_ms: step less that of the floor.
        ratio: step over that of the baseline.
        peak_bytes: memory within a step.
        rest_bytes: memory between steps.
        wire_bytes: sent per rank and step.
        wire_ratio: the same over this rank's share of the formula of the ZeRO stage.
        least_ms: what the formula's bytes take on a node's link at the measured goodput.
        first_s: to the end of the first step, median over rounds.
        compared: whether there were losses of another contender to compare its own with.
        disagreement: largest relative difference of a loss, if it is too large.
    """

    contender: str
    failure: str = ""
    step_ms: float | None = None
    spread_ms: float | None = None
    per_second: float | None = None
    exposed_ms: float | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    rest_bytes: int | None = None
    wire_bytes: float | None = None
    wire_ratio: float | None = None
    least_ms: float | None = None
    first_s: float | None = None
    compared: bool = False
    disagreement: float | None = None


def summarize(
    outcomes: Sequence[Outcome],
    *,
    ranks: int,
    nodes: int,
    baseline: str = FLOOR,
    goodput: float | None = None,
) -> list[Figures]:
    """One line for each contender, in the order of their first outcomes.

    A contender that failed in any round failed, and nothing is over its times. What one is over
    another is of the rounds that both ran: an interruption leaves some with one less.

    Args:
        outcomes: of all rounds.
        ranks: of all nodes.
        nodes: hosts between which bytes are counted; as many as ranks on one machine's own network.
        baseline: what ratios are of.
        goodput: bytes per second of each node's link.
    """
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.contender, []).append(outcome)
    times = {
        name: [one.step_ms for one in group if one.step_ms]
        for name, group in grouped.items()
        if not any(one.failure for one in group)
    }
    differences = loss_differences(grouped)
    return [
        _figures(name, group, times, baseline, ranks, nodes, goodput, differences.get(name))
        for name, group in grouped.items()
    ]


def _figures(
    name: str,
    group: Sequence[Outcome],
    times: Mapping[str, list[float]],
    baseline: str,
    ranks: int,
    nodes: int,
    goodput: float | None,
    difference: float | None,
) -> Figures:
    failure = next((one.failure for one in group if one.failure), "")
    if failure:
        return Figures(name, failure)
    mine = times[name]
    step, floor, base = (_medians(mine, times.get(each, [])) for each in (name, FLOOR, baseline))
    least = formula_bytes(CONTENDERS[name].traffic, group[0].num_params, nodes)
    needed = least * nodes / ranks
    wire = _median(one.wire_bytes for one in group)
    allowed = difference is not None and difference <= CONTENDERS[name].rtol
    return Figures(
        name,
        step_ms=step[0] if step else None,
        spread_ms=max(mine) - min(mine) if mine else None,
        per_second=1e3 * group[0].num_units / step[0] if step else None,
        exposed_ms=floor[0] - floor[1] if floor else None,
        ratio=base[0] / base[1] if base else None,
        peak_bytes=max(one.peak_bytes for one in group) or None,
        rest_bytes=max(one.rest_bytes for one in group) or None,
        wire_bytes=wire,
        wire_ratio=wire / needed if wire and needed else None,
        least_ms=1e3 * least / goodput if goodput and least else None,
        first_s=_median(one.first_s for one in group),
        compared=difference is not None,
        disagreement=difference if not allowed else None,
    )


def formula_bytes(traffic: int, num_params: int, nodes: int) -> float:
    """Bytes of fp32 that must leave each node per step: (N−1)/N × traffic × 4Ψ.

    A node is whatever bytes are counted between: a host with all its ranks, or a rank.
    """
    return (nodes - 1) / nodes * traffic * 4 * num_params


def loss_differences(grouped: Mapping[str, Sequence[Outcome]]) -> dict[str, float]:
    """How far each contender's losses are from the median exact contender's, relatively, at worst.

    The floor's ranks train models of their own: only its first loss is compared. Empty if nobody
    else has losses.
    """
    curves = {
        name: [one.losses[: None if _averages(name) else 1] for one in group if one.losses]
        for name, group in grouped.items()
    }
    if sum(map(bool, curves.values())) < 2:
        return {}
    trained = [name for name in curves if _averages(name)]
    exact = [name for name in trained if CONTENDERS[name].exact]
    joined = [curve for name in exact or trained for curve in curves[name]]
    if not joined:
        return {}
    middle = [statistics.median(column) for column in zip(*joined, strict=True)]
    return {name: _furthest(found, middle) for name, found in curves.items() if found}


def _averages(name: str) -> bool:
    return CONTENDERS[name].averages


def _furthest(curves: Sequence[Sequence[float]], middle: Sequence[float]) -> float:
    differences = [
        abs(loss - wanted) / abs(wanted)
        for curve in curves
        for loss, wanted in zip(curve, middle, strict=False)
    ]
    # max() forgets what is not a number.
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def _medians(mine: Sequence[float], others: Sequence[float]) -> tuple[float, float] | None:
    """Of the rounds that both ran; `None` if there are none."""
    both = list(zip(mine, others, strict=False))
    if not both:
        return None
    return statistics.median(one for one, _ in both), statistics.median(two for _, two in both)


def _median(values: Iterable[float]) -> float | None:
    found = [value for value in values if value > 0]  # others on `lo` can make a count negative
    return statistics.median(found) if found else None
