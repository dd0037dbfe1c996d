"""Lockstep of whole steps with codes: near the exact ones, whatever shapes, nodes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.passes.golden import apply
from tests.passes.models import data_for
from tests.program_builder import Model, Read, cut, inputs_for, run_step, specs_of, trace_joint
from zerofx.config import ZeroConfig
from zerofx.ir import ops
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Layout
from zerofx.ir.verify import verify
from zerofx.passes.pipelines import pipeline
from zerofx.sim.codes import ErrorsByBucket
from zerofx.sim.lockstep import run_lockstep

NODES = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (4, 1, 2), (4, 1, 4), (6, 1, 2), (2, 2, 1)]
"""Shards, replicas, nodes."""


def _two_layers(read: Read, buffers: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    hidden = torch.tanh(inputs[0] @ read("a.weight").t() + read("a.bias"))
    return ((hidden @ read("b.weight").t()).square().mean(),)


def _with_a_sum(read: Read, buffers: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """One gradient is a single number, expanded."""
    (loss,) = _two_layers(read, buffers, inputs)
    return (loss + 1e-6 * read("c.weight").sum(),)


@st.composite
def models(draw: st.DrawFn) -> Model:
    shards, replicas, nodes = draw(st.sampled_from(NODES))
    layout = Layout(2, shards, replicas, False, node_size=shards // nodes)
    wide, hidden, out = (draw(st.integers(1, 60)) for _ in range(3))
    shapes = {"a.weight": (hidden, wide), "a.bias": (hidden,), "b.weight": (out, hidden)}
    shapes["c.weight"] = (hidden, out)
    params = specs_of(shapes, layout, small=draw(st.sampled_from([0, 100])), dtype=torch.float32)
    return Model(_with_a_sum, params, [torch.zeros(3, wide)])


def _final(model: Model, **options: Any) -> tuple[Program, Program]:
    forward, backward = cut(trace_joint(model))
    for each in pipeline(ZeroConfig(broadcast_buffers=False, **options)):
        for program in (forward, backward):
            if program.region in each.regions:
                apply(program, each)
                verify(program, [each.name])
    return forward, backward


def _codecs(program: Program) -> dict[str, tuple[str, ...]]:
    starts = program.calls(*ops.STARTS)
    return {name: ops.codecs(start) for start in starts for name in facts(start).members}


@settings(max_examples=15)
@given(models(), st.sampled_from(["int8x32", "int8x64.asymmetric"]))
def test_a_step_with_codes_is_near_the_exact_one(model: Model, codec: str) -> None:
    world = next(iter(model.params.values())).layout
    ranks = world.num_shards * world.num_replicas
    data = data_for(model, ranks)
    inputs = inputs_for(
        model,
        {name: value.float() for name, value in data.values.items()},
        data.buffers,
        [[x.float() for x in one] for one in data.inputs],
    )
    exact = run_step(*_final(model), inputs)
    programs = _final(model, quantize_weights=codec, quantize_gradients=codec)
    found = run_step(*programs, inputs)
    for got, want in zip(found[1], exact[1], strict=True):
        for grad, wanted in zip(got, want, strict=True):
            if wanted is not None:
                torch.testing.assert_close(grad, wanted, rtol=0.2, atol=0.2 * _size(exact[1]))
    losses = [torch.stack([row[0] for row in each[0]]) for each in (found, exact)]
    torch.testing.assert_close(*losses, rtol=0.2, atol=1e-3)


def _size(gradients: Sequence[Sequence[Tensor | None]]) -> float:
    return max(float(g.abs().max()) for row in gradients for g in row if g is not None and len(g))


def test_a_parameter_travels_alike_in_every_program() -> None:
    layout = Layout(2, 2, 1, False, node_size=2)
    shapes = {"a.weight": (40, 40), "a.bias": (40,), "b.weight": (40, 40)}
    model = Model(_two_layers, specs_of(shapes, layout), [torch.zeros(3, 40)])
    forward, backward = _final(
        model, quantize_weights="int8", quantize_gradients="int4", quantize_exact=("a.*",)
    )
    for program in (forward, backward):
        found = _codecs(program)
        assert not found.get("a.weight") and not found.get("a.bias")
        assert found["b.weight"] in (("int8x256",), ("int4x256", "int4x256"))


@pytest.mark.parametrize(("shards", "replicas", "nodes"), [(2, 1, 1), (4, 1, 2), (2, 2, 1)])
def test_feedback_brings_the_mean_of_many_steps_to_the_exact_one(
    shards: int, replicas: int, nodes: int
) -> None:
    layout = Layout(2, shards, replicas, False, node_size=shards // nodes)
    shapes = {"a.weight": (40, 40), "a.bias": (40,), "b.weight": (24, 40)}
    model = Model(_two_layers, specs_of(shapes, layout, dtype=torch.float32), [torch.zeros(3, 40)])
    data = data_for(model, shards * replicas)
    values = {name: value.float() for name, value in data.values.items()}
    inputs = inputs_for(model, values, data.buffers, [[x.float() for x in i] for i in data.inputs])
    forward, exact = _final(model)
    given = [
        [*result[forward.num_user_outputs :], torch.ones(())]
        for result in run_lockstep(forward, inputs)
    ]
    wanted = _flat(run_lockstep(exact, given))

    def off(codec: str) -> float:
        _, backward = _final(model, quantize_gradients=codec)
        errors: ErrorsByBucket = {}
        sent = [_flat(run_lockstep(backward, given, errors=errors)) for _ in range(25)]
        return float((torch.stack(sent).mean(0) - wanted).norm() / wanted.norm())

    assert off("int4x32.feedback") < off("int4x32") / 5


def _flat(gradients: Sequence[Sequence[Tensor | None]]) -> Tensor:
    return torch.cat([g.reshape(-1) for row in gradients for g in row if g is not None])
