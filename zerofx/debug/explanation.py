"""`explain`: what was captured, what a step does, and what would help; all of it computed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerofx.config import ZeroConfig
from zerofx.debug.captured import Captured, breaks_of, untrained
from zerofx.debug.changes import Retrace, Search, search
from zerofx.debug.decisions import Why, why
from zerofx.debug.outcome import (
    CollectiveTime,
    Outcome,
    Setting,
    collective_times,
    outcome_of,
    programs_of,
)
from zerofx.debug.record import GraphRecord, Texts, captured_of
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.frontend.joint import Call, dynamo_graphs
from zerofx.frontend.rehearsal import Rehearsal, rehearse_graph
from zerofx.ir.spec import Region
from zerofx.torch_private import (
    compilations,
    fake_copy,
    fake_mode,
    map_tensors,
    tensors_in,
)

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What happened when a script ran.

    Attributes:
        num_ranks: on how many ranks its model was.
        steps: optimizer steps that were timed, those that compile left out.
        step: median seconds from one to the next; `None`: fewer than two were taken.
        compile_seconds: of all compilations.
        peak_bytes: most bytes that the GPU's allocator held; `None` on CPUs.
    """

    num_ranks: int
    steps: int
    step: float | None
    compile_seconds: float
    peak_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A program on one screen; `str()` of it is that screen.

    Attributes:
        name: of the model or script.
        setting: options and machine.
        captured: graphs, breaks, recompiles.
        outcome: predicted time, memory and traffic of a step.
        collectives: of a step, in order.
        search: the changes that would help most; `None`: nobody asked for them.
        measured: what a script did; `None` for a model.
        texts: by region (`graph1/forward` from the second graph on), the program after each pass.
        reports: by region, the entry of `report.json`.
    """

    name: str
    setting: Setting
    captured: Captured
    outcome: Outcome
    collectives: tuple[CollectiveTime, ...]
    search: Search | None
    measured: Measured | None
    texts: dict[str, dict[str, str]]
    reports: dict[str, dict[str, Any]]

    def __str__(self) -> str:
        from zerofx.debug.explain_text import as_text  # which needs this class

        return "\n\n".join(as_text(self))

    def why(self, node: str) -> list[Why]:
        """Why a node stands where it does, in each program that has it.

        Raises:
            ConfigError: no program has it.
        """
        return why(node, self.texts, self.reports)

    def until(self, name: str) -> dict[str, str]:
        """The programs after the pass `name`, by region.

        Raises:
            ConfigError: no such pass ran.
        """
        found = {region: after[name] for region, after in self.texts.items() if name in after}
        if not found:
            known = dict.fromkeys(each for after in self.texts.values() for each in after)
            raise ConfigError(f"no pass {name!r} ran", f"these did: {', '.join(known)}")
        return found


def explain_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    setting: Setting,
    *,
    name: str = "",
    changes: bool = True,
    say: Say = lambda what: None,
) -> Explanation:
    """Explain a plain model; it is copied to fake tensors, and neither run nor changed.

    Args:
        model: plain, on any device.
        args: inputs of its forward.
        kwargs: likewise, by name.
        setting: options and machine.
        name: of the model; by default its class.
        changes: whether to look for changes that would help.
        say: called with what begins.

    Raises:
        UnsupportedError: nothing of it trains, or it is sharded.
    """
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise UnsupportedError(
            f"{type(model).__name__} is sharded already", "explain the model before it is compiled"
        )
    say("tracing the model")
    begin = time.time()
    traced = _trace(model, args, kwargs)
    seen = compilations(begin)
    breaks, stopped = breaks_of(traced.call.breaks, seen), traced.call.stopped
    records = _rehearsed(traced, setting.config)
    if not any(each.rehearsal for each in records):
        # Fake tensors that are asked for values name the operation; other errors are the model's.
        frozen = not any(param.requires_grad for param in model.parameters())
        fails = stopped and not stopped.startswith("aten.")
        otherwise = _no_backward(model, stopped)
        raise untrained(type(model).__name__, () if fails or frozen else breaks, otherwise)

    def retrace(cast: torch.dtype | None, times: int) -> list[Rehearsal]:
        config = dataclasses.replace(setting.config, param_dtype=cast)
        larger, larger_named = _repeated((args, kwargs), times)
        again = traced if times == 1 else _trace(model, larger, larger_named)
        return [each.rehearsal for each in _rehearsed(again, config) if each.rehearsal]

    captured = captured_of(records, breaks, seen, stopped)
    return explanation_of(
        name or type(model).__name__,
        setting,
        captured,
        records,
        retrace=retrace,
        changes=changes,
        say=say,
    )


def explanation_of(
    name: str,
    setting: Setting,
    captured: Captured,
    records: Sequence[GraphRecord],
    *,
    retrace: Retrace | None = None,
    measured: Measured | None = None,
    changes: bool = True,
    say: Say = lambda what: None,
) -> Explanation:
    """Put together what is known.

    Args:
        name: of the model or script.
        setting: options and machine.
        captured: graphs, breaks, recompiles.
        records: graphs with a backward, at least one.
        retrace: see `zerofx.debug.changes.search`.
        measured: what a script did.
        changes: whether to look for changes that would help.
        say: called with what begins.
    """
    say("running the passes")
    training = [each for each in records if each.rehearsal is not None]
    rehearsals = [each.rehearsal for each in training if each.rehearsal is not None]
    told = [Texts() for _ in training]
    programs = programs_of(rehearsals, setting, told)
    outcome = outcome_of(programs, rehearsals, setting)
    texts: dict[str, dict[str, str]] = {}
    reports: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(told):
        prefix = f"graph{number}/" if number else ""
        for region in (Region.JOINT.value, Region.FORWARD.value, Region.BACKWARD.value):
            if region in each.after and region in each.reports:
                texts[prefix + region] = each.after[region]
                reports[prefix + region] = each.reports[region]
    return Explanation(
        name,
        setting,
        captured,
        outcome,
        tuple(collective_times(programs, rehearsals, setting)),
        search(outcome, programs, rehearsals, setting, retrace, say) if changes else None,
        measured,
        texts,
        reports,
    )


def _no_backward(model: nn.Module, stopped: str) -> tuple[str, str]:
    """What is wrong, and the remedy."""
    name = type(model).__name__
    if stopped and any(param.requires_grad for param in model.parameters()):
        return (
            f"forward of {name} fails with these inputs: {stopped}",
            "give the inputs that it takes, in number, shape and dtype; their values are not known",
        )
    return (
        f"{name} has no backward to explain" + (f": {stopped}" if stopped else ""),
        "give it trainable parameters, and a forward that uses them",
    )


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A model with fake parameters, and its forward on fake tensors."""

    model: nn.Module
    call: Call


def _trace(model: nn.Module, args: Any, kwargs: Any) -> _Traced:
    mode = fake_mode()
    copied = fake_copy(model, mode)
    with mode:
        plain, named = map_tensors(mode.from_tensor, (tuple(args), dict(kwargs)))
    return _Traced(copied, dynamo_graphs(copied, plain, named, mode))


def _rehearsed(traced: _Traced, config: ZeroConfig) -> list[GraphRecord]:
    """Records of all graphs; those that read parameters have programs."""
    known = {id(param) for param in traced.model.parameters()}
    records: list[GraphRecord] = []
    for (module, values), runs in zip(traced.call.graphs, traced.call.runs, strict=True):
        record = GraphRecord(module)
        records.append(record)
        trains = any(value.requires_grad for value in tensors_in(values))
        if trains and any(id(value) in known for value in values):
            cast, inner, often = config.param_dtype, config.inner, max(1, runs)
            record.rehearsal = dataclasses.replace(
                rehearse_graph(module, values, traced.model, inner=inner, cast=cast),
                runs=float(often * config.accumulate),
                nested=often,
            )
    return records


def _repeated(inputs: Any, times: int) -> Any:
    """Inputs with so many times the samples: dimension 0 of those that share its size."""
    sizes = [len(tensor) for tensor in tensors_in(inputs) if tensor.dim()]
    batch = sizes[0] if sizes else 0

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or len(tensor) != batch:
            return tensor
        return tensor.detach().repeat(times, *[1] * (tensor.dim() - 1))

    return map_tensors(repeat, inputs)
