"""Functions whose programs the meaning tests run, and what they must compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.program_builder import Model, Read, cut, inputs_for, run_step, specs_of, trace_joint
from zerofx.config import ZeroConfig
from zerofx.ir.cut import verify_cut
from zerofx.ir.meaning import Meanings
from zerofx.ir.program import Program
from zerofx.ir.spec import Layout
from zerofx.passes.base import Pass, run_passes
from zerofx.passes.pipelines import pipeline
from zerofx.sim.lockstep import shards_of

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (5, 7), "b.bias": (5,), "scale": ()}


def tied_mlp(read: Read, buffers: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """Two layers; the second's output goes through the first again; a buffer; a weight returned."""
    hidden = torch.relu(inputs[0] @ read("a.weight").t() + read("a.bias"))
    hidden = hidden @ read("b.weight").t() + read("b.bias") - buffers[0]
    hidden = torch.relu(hidden @ read("a.weight").t())
    loss = (hidden * hidden).mean() * read("scale")
    return loss, buffers[0] * 0.9 + 0.1, read("a.weight").t()[1:]


def mlp(layout: Layout, *, small: int = 6, frozen: Sequence[str] = ()) -> Model:
    """The model, with biases of fewer than `small` elements replicated."""
    params = specs_of(SHAPES, layout, small=small, frozen=frozen)
    inputs = [torch.zeros(4, 5, dtype=torch.float64)]
    return Model(tied_mlp, params, inputs, {"mean": torch.zeros(5, dtype=torch.float64)})


def layout_for(stage: int, shards: int, replicas: int) -> Layout:
    if stage == 0:
        return Layout(1, 1, shards * replicas, False)
    return Layout(2, shards, replicas, resident=stage < 3)


def passes_for(stage: int, without: str = "") -> tuple[Pass, ...]:
    disable = (without,) if without else ()
    return pipeline(ZeroConfig(stage=stage, disable=disable))  # type: ignore[arg-type]


def mandatory_for(stage: int) -> tuple[Pass, ...]:
    return tuple(each for each in passes_for(stage) if each.mandatory)


@dataclasses.dataclass
class Data:
    """What all ranks start from."""

    values: dict[str, Tensor]
    buffers: list[list[Tensor]]
    inputs: list[list[Tensor]]


def data_for(model: Model, world: int, *, same_buffers: bool = False) -> Data:
    made = torch.Generator().manual_seed(world)

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=made, dtype=torch.float64)

    values = {name: draw(spec.shape) for name, spec in model.params.items()}
    buffers = [[draw(b.shape) for b in model.buffers.values()] for _ in range(world)]
    if same_buffers:
        buffers = [[b.clone() for b in buffers[0]] for _ in range(world)]
    inputs = [[draw(each.shape) for each in model.inputs] for _ in range(world)]
    return Data(values, buffers, inputs)


def compile_all(model: Model, stage: int, passes: Sequence[Pass]) -> tuple[Program, Program]:
    """Forward and backward after every pass, verified after each."""
    joint = trace_joint(model, stage)
    run_passes(joint, passes)
    forward, backward = cut(joint)
    verify_cut(joint, forward, backward, Meanings(joint))
    run_passes(forward, passes)
    run_passes(backward, passes)
    return forward, backward


def step(model: Model, data: Data, forward: Program, backward: Program) -> Any:
    return run_step(forward, backward, inputs_for(model, data.values, data.buffers, data.inputs))


def expected(model: Model, data: Data) -> tuple[list[Any], list[list[Tensor | None]]]:
    """Outputs of each rank, and its part of each mean gradient, as DistributedDataParallel."""
    world = len(data.inputs)
    runs = [model.plain(data.values, data.buffers[0], rows) for rows in data.inputs]
    gradients: list[list[Tensor | None]] = [[] for _ in range(world)]
    for place, spec in enumerate(model.params.values()):
        mine = [grads[place] for _, grads in runs]
        if mine[0] is None:
            parts: list[Tensor | None] = [None] * world
        else:
            parts = list(shards_of(sum(mine) / world, spec))  # type: ignore[arg-type]
        for rank in range(world):
            gradients[rank].append(parts[rank])
    return [outs for outs, _ in runs], gradients


def close(found: Any, wanted: Any, *, exact: bool = False) -> bool:
    """Whether two nests of tensors and Nones are equal, up to fp64 rounding unless `exact`."""
    if isinstance(wanted, Tensor):
        if not isinstance(found, Tensor) or found.shape != wanted.shape:
            return False
        rtol, atol = (0.0, 0.0) if exact else (1e-12, 1e-14)
        return torch.allclose(found, wanted, rtol=rtol, atol=atol)
    if wanted is None:
        return found is None
    pairs = zip(found, wanted, strict=False)
    return len(found) >= len(wanted) and all(close(a, b, exact=exact) for a, b in pairs)
