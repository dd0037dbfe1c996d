"""Every pass leaves what a program computes as it is: lockstep before and after it agrees."""

from __future__ import annotations

import pytest

from tests.passes.golden import apply
from tests.passes.models import close, data_for, layout_for, mlp, passes_for
from tests.program_builder import cut, inputs_for, run_joint, run_step, trace_joint
from zerofx.ir.spec import Region

MESHES = [(2, 1), (4, 1), (2, 2)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("shards", "replicas"), MESHES)
def test_each_pass_keeps_the_meaning(stage: int, shards: int, replicas: int) -> None:
    model = mlp(layout_for(stage, shards, replicas))
    # Buffers that differ would show `sync_buffers`, the one pass that changes what is computed.
    data = data_for(model, shards * replicas, same_buffers=True)
    inputs = inputs_for(model, data.values, data.buffers, data.inputs)
    joint = trace_joint(model, stage)
    before = run_joint(joint, inputs)
    for each in passes_for(stage):
        if Region.JOINT in each.regions:
            apply(joint, each)
            after = run_joint(joint, inputs)
            assert close(after, before, exact=each.numerics == "exact"), each.name
            before = after
    forward, backward = cut(joint)
    number = joint.num_user_outputs
    outputs, gradients = run_step(forward, backward, inputs)
    assert close(outputs, [row[:number] for row in before], exact=True)
    assert close(gradients, [row[number:] for row in before], exact=True)
    for each in passes_for(stage):
        for program in (forward, backward):
            if program.region in each.regions:
                apply(program, each)
        after = run_step(forward, backward, inputs)
        assert close(after, (outputs, gradients), exact=each.numerics == "exact"), each.name


def test_sync_buffers_gives_every_rank_the_buffers_of_rank_zero() -> None:
    model = mlp(layout_for(3, 2, 1))
    data = data_for(model, 2)
    forward, backward = cut(trace_joint(model))
    (sync,) = (each for each in passes_for(3) if each.name == "sync_buffers")
    apply(forward, sync)
    inputs = inputs_for(model, data.values, data.buffers, data.inputs)
    outputs, _ = run_step(forward, backward, inputs)
    wanted = data.buffers[0][0] * 0.9 + 0.1
    assert all(close(row[1], wanted, exact=True) for row in outputs)
