"""Whole pipelines of each stage against plain computation; none of their passes is idle."""

from __future__ import annotations

import pytest
import torch

from tests.passes.models import (
    close,
    compile_all,
    data_for,
    expected,
    layout_for,
    mandatory_for,
    mlp,
    passes_for,
    step,
)
from tests.program_builder import inputs_for, trace_inference
from zerofx.errors import PassError, VerificationError
from zerofx.ir import ops
from zerofx.ir.facts import facts
from zerofx.passes.base import run_passes
from zerofx.sim.lockstep import LockstepError, run_lockstep

MESHES = [(1, 1), (2, 1), (4, 1), (2, 2)]
STAGES = [0, 1, 2, 3]
MANDATORY = [(stage, each.name) for stage in STAGES for each in mandatory_for(stage)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("shards", "replicas"), MESHES)
def test_pipeline_computes_what_one_process_computes(
    stage: int, shards: int, replicas: int
) -> None:
    model = mlp(layout_for(stage, shards, replicas))
    data = data_for(model, shards * replicas)
    outputs, gradients = step(model, data, *compile_all(model, stage, passes_for(stage)))
    wanted_outputs, wanted_gradients = expected(model, data)
    assert close(outputs, wanted_outputs)
    assert close(gradients, wanted_gradients)


@pytest.mark.parametrize("stage", STAGES)
def test_more_ranks_than_rows(stage: int) -> None:
    model = mlp(layout_for(stage, 6, 1), small=1)
    data = data_for(model, 6)
    outputs, gradients = step(model, data, *compile_all(model, stage, passes_for(stage)))
    assert close((outputs, gradients), expected(model, data))


@pytest.mark.parametrize("stage", STAGES)
def test_inference(stage: int) -> None:
    model = mlp(layout_for(stage, 2, 1))
    data = data_for(model, 2)
    program = trace_inference(model, stage)
    run_passes(program, passes_for(stage))
    found = run_lockstep(program, inputs_for(model, data.values, data.buffers, data.inputs))
    assert close(found, expected(model, data)[0])


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_are_gathered_and_never_reduced(stage: int) -> None:
    model = mlp(layout_for(stage, 2, 1), frozen=("b.weight", "a.bias"))
    data = data_for(model, 2)
    forward, backward = compile_all(model, stage, passes_for(stage))
    assert close(step(model, data, forward, backward), expected(model, data))
    reduced = {name for node in backward.calls(ops.REDUCE_START) for name in facts(node).members}
    assert reduced == {"a.weight", "b.bias", "scale"}


@pytest.mark.parametrize(("stage", "name"), MANDATORY)
def test_no_mandatory_pass_is_idle(stage: int, name: str) -> None:
    """Without it the verifier refuses the program, or the numbers differ."""
    model = mlp(layout_for(stage, 2, 1))
    data = data_for(model, 2)
    try:
        programs = compile_all(model, stage, passes_for(stage, without=name))
    except (VerificationError, PassError):
        return
    try:
        found = step(model, data, *programs)
    except LockstepError:
        return
    assert not close(found, expected(model, data)), f"stage {stage} does not need {name}"


def test_stage_one_reduces_after_the_last_gradient_and_stage_two_at_once() -> None:
    last_compute = {}
    for stage in (1, 2):
        model = mlp(layout_for(stage, 2, 1))
        _, backward = compile_all(model, stage, passes_for(stage))
        names = [node.target for node in backward.graph.nodes if node.op == "call_function"]
        last_compute[stage] = names.index(ops.REDUCE_START) > max(
            place for place, target in enumerate(names) if target is torch.ops.aten.mm.default
        )
    assert last_compute == {1: True, 2: False}


def test_stage_three_gathers_each_parameter_once_in_each_direction() -> None:
    model = mlp(layout_for(3, 2, 1))
    forward, backward = compile_all(model, 3, mandatory_for(3))
    gathered, again = (
        sorted(name for start in program.calls(ops.UNSHARD_START) for name in facts(start).members)
        for program in (forward, backward)
    )
    assert gathered == ["a.bias", "a.weight", "b.weight"]
    assert again == ["a.weight", "b.weight"]
