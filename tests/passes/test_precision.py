"""Mixed precision in lockstep: what casts mean, and that no pass changes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.golden import apply
from tests.passes.models import (
    close,
    compile_all,
    data_for,
    expected,
    layout_for,
    passes_for,
    step,
)
from tests.program_builder import Model, Read, cut, inputs_for, run_joint, specs_of, trace_joint
from zerofx.ir import ops
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.verify import peak_full_bytes
from zerofx.passes.cast_before_gather import CastBeforeGather

F32 = torch.float32
SHAPES = {"a.weight": (8, 6), "a.bias": (8,), "b.weight": (6, 8), "scale": ()}


def low(read: Read, _: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """Computes in the dtype of the parameters, and reads one of them twice."""
    x = inputs[0].to(read("scale").dtype)
    hidden = torch.tanh(x @ read("a.weight").t() + read("a.bias"))
    hidden = torch.tanh(hidden @ read("b.weight").t()) @ read("a.weight").t()
    return ((hidden.square().mean() * read("scale")).double(),)


def autocast(read: Read, _: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """Casts weights where they are used, as `torch.autocast` does."""
    x = inputs[0].to(F32)
    hidden = x @ read("a.weight").to(F32).t() + read("a.bias")
    hidden = hidden.to(F32) @ read("b.weight").to(F32).t() @ read("a.weight").to(F32).t()
    return ((hidden.double() * read("scale")).square().mean(),)


def _model(stage: int, shards: int, replicas: int, **options: Any) -> Model:
    layout = dataclasses.replace(layout_for(stage, shards, replicas), **options)
    params = specs_of(SHAPES, layout, small=9, param_dtype=F32)
    return Model(low, params, [torch.zeros(4, 6, dtype=torch.float64)])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (4, 1), (2, 2)])
def test_pipeline_computes_in_the_dtype_of_the_policy(
    stage: int, shards: int, replicas: int
) -> None:
    model = _model(stage, shards, replicas)
    data = data_for(model, shards * replicas)
    outputs, gradients = step(model, data, *compile_all(model, stage, passes_for(stage)))
    wanted_outputs, wanted_gradients = expected(model, data)
    assert close(outputs, wanted_outputs, exact=True)
    for mine, wanted in zip(gradients, wanted_gradients, strict=True):
        for got, want in zip(mine, wanted, strict=False):
            assert isinstance(want, Tensor) and got.dtype is torch.float64
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)
            assert torch.equal(got, got.to(F32).double()), "the mean was not rounded to its dtype"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_pass_keeps_the_meaning(stage: int) -> None:
    model = _model(stage, 2, 1, reduce_dtype=torch.bfloat16)
    data = data_for(model, 2)
    inputs = inputs_for(model, data.values, data.buffers, data.inputs)
    joint = trace_joint(model, stage)
    for each in passes_for(stage):
        if Region.JOINT in each.regions:
            apply(joint, each)
    forward, backward = cut(joint)
    before = step(model, data, forward, backward)
    assert close(run_joint(joint, inputs), [[*a, *b] for a, b in zip(*before, strict=True)])
    for each in passes_for(stage):
        for program in (forward, backward):
            if program.region in each.regions:
                apply(program, each)
        assert close(step(model, data, forward, backward), before, exact=True), each.name
    found = [g for grads in before[1] for g in grads if isinstance(g, Tensor)]
    assert all(torch.equal(grad, grad.bfloat16().double()) for grad in found)


def test_cast_before_gather_is_exact_and_halves_the_bytes() -> None:
    params = specs_of(SHAPES, layout_for(3, 2, 1), small=9)
    model = Model(autocast, params, [torch.zeros(4, 6, dtype=torch.float64)])
    data = data_for(model, 2)
    plain = compile_all(model, 3, passes_for(3, without="cast_before_gather"))
    lowered = compile_all(model, 3, passes_for(3))
    assert close(step(model, data, *lowered), step(model, data, *plain), exact=True)
    for one, other in zip(lowered, plain, strict=True):
        assert 2 * _gathered(one) == _gathered(other) > 0
        assert 2 * peak_full_bytes(one) == peak_full_bytes(other)


def test_sums_over_all_reads_decide() -> None:
    """A tied weight that one reader wants whole is gathered whole, once."""

    def tied(read: Read, _: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        x = inputs[0] @ read("w")
        return ((x.to(F32) @ read("w").to(F32)).double().mean(),)

    params = specs_of({"w": (6, 6)}, layout_for(3, 2, 1))
    model = Model(tied, params, [torch.zeros(4, 6, dtype=torch.float64)])
    forward, _ = compile_all(model, 3, passes_for(3))
    (wait,) = forward.calls(ops.UNSHARD_WAIT)
    assert wait.meta["val"].dtype is torch.float64
    joint = trace_joint(model, 3)
    assert CastBeforeGather().plan(joint).lowered, "before reads are merged it looks possible"


def _gathered(program: Program) -> int:
    return sum(facts(start).wire_bytes for start in program.calls(ops.UNSHARD_START))
