"""The referee itself: plain arithmetic across ranks, and what it refuses to let pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.hand_program import Hand
from tests.passes.models import close, data_for, expected, layout_for, mlp
from tests.program_builder import (
    cut,
    inputs_for,
    layout_of,
    run_joint,
    run_step,
    specs_of,
    trace_inference,
    trace_joint,
)
from zerofx.ir import ops
from zerofx.ir.facts import Role, set_facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.sim.lockstep import LockstepError, run_lockstep, shards_of

aten = torch.ops.aten
PARAMS = specs_of({"w": (5, 3)}, layout_of(2))
SPEC = PARAMS["w"]
MESHES = [(2, 1), (3, 1), (4, 1), (2, 2), (1, 3)]


def full_value() -> Tensor:
    return torch.arange(15, dtype=torch.float64).view(5, 3)


def run(program: Program, *inputs: Tensor) -> list[list[Tensor]]:
    """On two ranks, with the same inputs after the shard."""
    shards = shards_of(full_value(), SPEC)
    return run_lockstep(program, [[shard, *inputs] for shard in shards], world=2)


@pytest.mark.parametrize(("shards", "replicas"), MESHES)
def test_gather_and_mean_over_all_ranks(shards: int, replicas: int) -> None:
    world = shards * replicas
    spec = specs_of({"w": (5, 3)}, layout_of(shards, replicas))["w"]
    hand = Hand({"w": spec}, Region.JOINT)
    shard, grad = hand.shard("w"), hand.input("g", 5, 3)
    program = hand.program([hand.gather(shard), hand.unshard(shard), hand.reduce(grad, shard)])
    grads = [torch.full((5, 3), float(rank), dtype=torch.float64) for rank in range(world)]
    parts = shards_of(full_value(), spec)
    out = run_lockstep(program, [[parts[rank], grads[rank]] for rank in range(world)])
    for rank, (waited, marked, mean) in enumerate(out):
        assert torch.equal(waited, full_value()) and torch.equal(marked, full_value())
        assert mean.shape == parts[rank].shape
        assert (mean == (world - 1) / 2).all()


@pytest.mark.parametrize(("shards", "replicas"), MESHES)
@pytest.mark.parametrize("stage", [0, 3])
def test_markers_alone_compute_what_one_process_computes(
    stage: int, shards: int, replicas: int
) -> None:
    model = mlp(layout_for(stage, shards, replicas))
    data = data_for(model, shards * replicas, same_buffers=True)
    inputs = inputs_for(model, data.values, data.buffers, data.inputs)
    wanted = expected(model, data)
    joint = trace_joint(model, stage)
    number = joint.num_user_outputs
    rows = run_joint(joint, inputs)
    assert close(([row[:number] for row in rows], [row[number:] for row in rows]), wanted)
    assert close(run_step(*cut(joint), inputs), wanted)
    assert close(run_lockstep(trace_inference(model, stage), inputs), wanted[0])


def test_low_precision_means_are_taken_in_fp32() -> None:
    params = specs_of({"w": (2, 1)}, layout_of(2), dtype=torch.bfloat16)
    hand = Hand(params, Region.BACKWARD)
    shard, grad = hand.shard("w"), hand.input("g", 2, 1)
    program = hand.program([hand.reduce(grad, shard)])
    ones = torch.ones(2, 1, dtype=torch.bfloat16)
    out = run_lockstep(program, [[ones[:1], ones * 256], [ones[1:], ones]])
    assert out[0][0].dtype is torch.bfloat16
    assert out[0][0].item() == torch.tensor(128.5).to(torch.bfloat16).item()


def test_gathers_do_not_share_memory_with_shards() -> None:
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard("w"))
    hand.call(aten.mul_.Tensor, full, 0.0)
    out = run(hand.program([full, hand.graph.find_nodes(op="placeholder")[0]]))
    assert out[0][0].sum() == 0 and torch.equal(torch.cat([row[1] for row in out]), full_value())


def test_free_poisons_every_view() -> None:
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard("w"))
    hidden = hand.call(_shares_memory_unseen, full)
    kept = hand.call(aten.clone.default, full)
    hand.free(full)
    for row in run(hand.program([kept])):
        assert torch.equal(row[0], full_value())
    assert all(view.isnan().all() for view in _SEEN) and len(_SEEN) == 2
    assert hidden.graph is hand.graph


def test_read_after_free() -> None:
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard("w"))
    view = hand.call(aten.t.default, full)
    hand.free(full)
    program = hand.program([hand.call(aten.relu.default, view)])
    _refuse(program, "reads .* after its free")


def test_returned_after_free() -> None:
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard("w"))
    view = hand.call(aten.t.default, full)
    hand.free(full)
    _refuse(hand.program([view]), "reads .* after its free")


def test_double_free() -> None:
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard("w"))
    hand.free(full)
    hand.free(full)
    _refuse(hand.program([]), "after its free")


@pytest.mark.parametrize("resident", [False, True])
def test_free_of_what_stays(resident: bool) -> None:
    params = specs_of({"w": (5, 3)}, layout_of(2, resident=resident))
    hand = Hand(params)
    shard = hand.shard("w")
    full = hand.gather(shard) if resident else hand.call(aten.relu.default, shard, param="w")
    hand.free(full)
    _refuse(hand.program([]), "parameter w frees what is not a gathered value")


def test_missing_wait() -> None:
    hand = Hand(PARAMS)
    hand.start(hand.shard("w"))
    _refuse(hand.program([]), "parameter w is never waited for")


def test_read_before_wait() -> None:
    hand = Hand(PARAMS)
    start = hand.start(hand.shard("w"))
    read = hand.call(aten.relu.default, start)
    hand.wait(start)
    _refuse(hand.program([read]), "before its wait")


def test_second_wait() -> None:
    hand = Hand(PARAMS)
    start = hand.start(hand.shard("w"))
    hand.wait(start)
    _refuse(hand.program([hand.wait(start)]), "waits a second time")


def test_write_under_way() -> None:
    hand = Hand(PARAMS)
    shard = hand.shard("w")
    start = hand.start(shard)
    hand.call(aten.mul_.Tensor, shard, 2.0)
    _refuse(hand.program([hand.wait(start)]), "changed under way")


def test_wait_without_start() -> None:
    hand = Hand(PARAMS)
    shard = hand.shard("w")
    args = (shard, shard, [5, 3])
    wait = hand.call(ops.UNSHARD_WAIT, *args, role=Role.FULL, param="w")
    _refuse(hand.program([wait]), "not started")


def test_shard_of_wrong_shape() -> None:
    hand = Hand(PARAMS)
    program = hand.program([hand.gather(hand.shard("w"))])
    with pytest.raises(LockstepError, match=r"gathers \(3, 3\) from rank 1, not \(2, 3\)"):
        run_lockstep(program, [[torch.ones(3, 3)], [torch.ones(3, 3)]])


def test_gradient_of_wrong_shape() -> None:
    hand = Hand(PARAMS, Region.BACKWARD)
    shard, grad = hand.shard("w"), hand.input("g", 5, 3)
    program = hand.program([hand.reduce(grad, shard)])
    with pytest.raises(LockstepError, match=r"gradient of shape \(5, 2\)"):
        run(program, torch.ones(5, 2))


def test_layout_of_another_world() -> None:
    hand = Hand(PARAMS)
    program = hand.program([hand.gather(hand.shard("w"))])
    with pytest.raises(LockstepError, match="layout shard2, not of 3 ranks"):
        run_lockstep(program, [[torch.ones(2, 3)]] * 3)
    with pytest.raises(LockstepError, match="inputs of 1 ranks for a world of 2"):
        run_lockstep(program, [[torch.ones(3, 3)]], world=2)


def test_node_without_facts() -> None:
    hand = Hand(PARAMS)
    full = hand.unshard(hand.shard("w"))
    set_facts(full, type(full.meta["zerofx"])())
    _refuse(hand.program([full]), "concerns no parameter")


_SEEN: list[Tensor] = []


def _shares_memory_unseen(full: Tensor) -> int:
    """What an analysis of views cannot know."""
    if type(full) is Tensor:
        _SEEN.append(full[1:].t())
    return 0


def _refuse(program: Program, match: str) -> None:
    with pytest.raises(LockstepError, match=match):
        run(program)
