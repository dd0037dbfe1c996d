"""`zerofx plan` in words: a table of stages, the formulas behind it, and which stage to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
from rich.console import RenderableType
from rich.table import Table

from zerofx.cli.plan_wire import Rates, wire_data, wire_text
from zerofx.cli.units import counted, show_bytes, show_count, show_seconds
from zerofx.config import ZeroConfig
from zerofx.cost.memory import PSI, TAU, Precision
from zerofx.frontend.planner import Plan


@dataclasses.dataclass(frozen=True)
class Question:
    """What was asked for.

    Attributes:
        target: the model, as it was written.
        num_ranks: W.
        batch: micro-batch size.
        length: S; `None` if no input has one.
        memory_bytes: of a device; `None` if nobody asks whether it fits.
        precision: that was asked for.
        config: the options but for the stage.
        formulas: peak memory of each stage in batch size and length, if that was asked for.
    """

    target: str
    num_ranks: int
    batch: int
    length: int | None
    memory_bytes: int | None
    precision: Precision
    config: ZeroConfig
    formulas: Mapping[int, Any] = dataclasses.field(default_factory=dict[int, Any])


def best_stage(plan: Plan, asked: Question) -> int | None:
    """The lowest stage that fits; `None` if none does."""
    if asked.memory_bytes is None:
        return None
    peaks = {stage: each.forecast.peak(asked.batch).total for stage, each in plan.stages.items()}
    return next((s for s, peak in sorted(peaks.items()) if peak <= asked.memory_bytes), None)


def as_data(plan: Plan, asked: Question) -> dict[str, Any]:
    """For `--json`: bytes and seconds."""
    return {
        "target": asked.target,
        "num_params": plan.num_params,
        "num_trained_params": plan.num_trained,
        "unread_params": list(plan.unread),
        "world_size": asked.num_ranks,
        "batch": asked.batch,
        "length": asked.length,
        "precision": asked.precision.name,
        "device_memory_bytes": asked.memory_bytes,
        "stage": best_stage(plan, asked),
        "extrapolated_from_depths": list(plan.traced),
        "stages": {str(stage): _stage_data(plan, stage, asked) for stage in plan.stages},
    }


def as_text(plan: Plan, asked: Question) -> tuple[RenderableType, ...]:
    """For people."""
    num_params = f"{show_count(plan.num_params)} parameters"
    if plan.num_trained < plan.num_params:
        num_params += f", τ = {show_count(plan.num_trained)} of them trained"
    length = "" if asked.length is None else f" × length {asked.length}"
    shape = f"batch {asked.batch}{length} a rank"
    head = (
        f"{asked.target}\nΨ = {num_params}, W = {counted(asked.num_ranks, 'rank')}, {shape},\n"
        f"{_precision(plan.precision)}\n"
    )
    notes = [
        "GB are 10⁹ bytes, of the rank that holds most, at the moment when it does. In flight are\n"
        "gathered values and messages; sent is a rank's traffic in one step.",
    ]
    if _several_nodes(plan):
        notes.append("Across is what leaves a rank's node, if messages take two hops.")
    notes += [text] if (text := wire_text(plan.stages)) else []
    if plan.unread:
        first, more = plan.unread[0], len(plan.unread) - 1
        named = f"{first} and {counted(more, 'other parameter')}" if more else first
        notes.append(f"Forward never reads {named}: without gradients and optimizer state.")
    if plan.traced:
        few, more = plan.traced
        notes.append(
            f"Traced with {few} and {more} of its {plan.depth} equal blocks and extrapolated "
            "node by node;\n--whole traces all of them."
        )
    return (
        head,
        _table(plan, asked),
        "\n".join(notes),
        _formulas(plan, asked),
        *_peaks(asked),
        _advice(plan, asked),
    )


def _stage_data(whole: Plan, stage: int, asked: Question) -> dict[str, Any]:
    plan = whole.stages[stage]
    peak = plan.forecast.peak(asked.batch)
    fixed, slope = plan.forecast.activations(asked.batch)
    rates = _rates(whole, stage, asked)
    out: dict[str, Any] = {
        "peak_bytes": peak.total,
        **dataclasses.asdict(peak),
        "activations_per_batch": [fixed, slope],
        "states_formula": str(rates.states().total),
        "sent_bytes": plan.sent_bytes,
        "across_nodes_bytes": plan.across_bytes,
        "wire": wire_data(plan),
        "auto": {name: dataclasses.asdict(each) for name, each in plan.weighed.items()},
        "step_seconds": plan.times.step,
        **{f"{name}_seconds": value for name, value in dataclasses.asdict(plan.times).items()},
    }
    if plan.stage in asked.formulas:
        out["peak_formula"] = str(asked.formulas[plan.stage])
    if asked.memory_bytes is not None:
        out["largest_batch"] = plan.forecast.largest_batch(asked.memory_bytes)
    return out


def _table(plan: Plan, asked: Question) -> Table:
    columns = ["stage", "params", "grads", "optim.", "activ.", "in flight", "peak", "sent", "step"]
    several = _several_nodes(plan)
    columns[-1:-1] = ["across"] if several else []
    columns += ["batch ≤"] if asked.memory_bytes is not None else []
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for column in columns:
        table.add_column(column, justify="left" if column == "stage" else "right", no_wrap=True)
    for stage, each in sorted(plan.stages.items()):
        peak = each.forecast.peak(asked.batch)
        sizes = (peak.params, peak.grads, peak.optimizer, peak.activations)
        row = [f"zero{stage}", *map(show_bytes, sizes), show_bytes(peak.gathered + peak.messages)]
        row += [show_bytes(peak.total), show_bytes(each.sent_bytes)]
        row += [show_bytes(each.across_bytes)] if several else []
        row.append(show_seconds(each.times.step))
        if asked.memory_bytes is not None:
            row.append(str(each.forecast.largest_batch(asked.memory_bytes) or "none"))
        table.add_row(*row)
    return table


def _several_nodes(plan: Plan) -> bool:
    return any(each.across_bytes for each in plan.stages.values())


def _formulas(plan: Plan, asked: Question) -> str:
    symbols = "Ψ, τ, W" if plan.num_trained < plan.num_params else "Ψ, W"
    lines = [f"bytes in {symbols} and the batch size B:"]
    for stage, each in sorted(plan.stages.items()):
        rates = _rates(plan, stage, asked)
        states = rates.states()
        fixed, slope = each.forecast.activations(asked.batch)
        linear = f"{show_bytes(max(0.0, fixed))} + {show_bytes(slope)}·B"
        sent = sympy.factor(rates.sent())
        total = sympy.expand(states.total)
        lines.append(f"  zero{stage}  states {total}, activations {linear}, sent {sent}")
    return "\n".join(lines)


def _rates(plan: Plan, stage: int, asked: Question) -> Rates:
    trained = PSI if plan.num_trained == plan.num_params else TAU
    each = plan.stages[stage]
    return Rates.of(each, asked.config, plan.precision, asked.num_ranks, trained)


def _peaks(asked: Question) -> Iterator[str]:
    if asked.formulas:
        lines = [f"  zero{stage}  {formula}" for stage, formula in sorted(asked.formulas.items())]
        yield "\n".join(["peak bytes in the batch size B and the length S:", *lines])


def _advice(plan: Plan, asked: Question) -> str:
    if asked.memory_bytes is None:
        return "Say --memory 80GB to learn which stage fits."
    stage = best_stage(plan, asked)
    size = show_bytes(asked.memory_bytes)
    if stage is not None:
        return f'Use backend="zero{stage}": the lowest stage that fits into {size}.'
    most = max(each.forecast.largest_batch(asked.memory_bytes) for each in plan.stages.values())
    remedy = f"a batch of at most {most}" if most else "more ranks, checkpointing, a shorter length"
    return f"No stage fits into {size}: it takes {remedy}."


def _precision(precision: Precision) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in precision.dtypes]
    short = [name.replace("bfloat", "bf").replace("float", "fp") for name in names]
    words = "mixed precision" if precision.name == "mixed" else " and ".join(short)
    sizes = precision.param, precision.grad, precision.optimizer
    each = "+".join(f"{float(size):.3g}" for size in sizes)
    return f"{words} with AdamW ({each} bytes a parameter)"
