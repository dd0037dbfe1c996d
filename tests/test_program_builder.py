"""The builder's programs look like AOTAutograd's, and compute what the plain function does."""

from __future__ import annotations

import torch

from tests.passes.models import SHAPES, mlp
from tests.program_builder import cut, layout_of, specs_of, trace_inference, trace_joint
from zerofx.ir import ops
from zerofx.ir.facts import Role, facts
from zerofx.ir.spec import Region


def test_joint_program_has_one_gradient_or_none_per_input() -> None:
    joint = trace_joint(mlp(layout_of(2), frozen=("a.bias",)))
    gradients = joint.outputs[joint.num_user_outputs :]
    inputs = joint.graph.find_nodes(op="placeholder")
    assert joint.num_user_outputs == 3 and len(gradients) == len(inputs) - 1
    has_gradient = [facts(n).param for n, g in zip(inputs, gradients, strict=False) if g]
    assert has_gradient == ["a.weight", "b.weight", "b.bias", "scale"]


def test_markers_read_their_shard_and_bear_facts() -> None:
    joint = trace_joint(mlp(layout_of(2)))
    markers = joint.calls(ops.UNSHARD, ops.REDUCE_GRAD)
    reads = len(SHAPES) + 2  # one weight is read three times, once of them outside the loss
    assert len(markers) == reads + reads - 1
    for node in markers:
        shard = node.args[0 if ops.is_call(node, ops.UNSHARD) else 1]
        assert isinstance(shard, torch.fx.Node) and facts(shard).role is Role.SHARD
        assert facts(shard).param == facts(node).param != ""
        assert facts(node).module == facts(node).param.rpartition(".")[0]


def test_forward_saves_shards_and_no_full_value() -> None:
    forward, backward = cut(trace_joint(mlp(layout_of(2))))
    saved = forward.outputs[forward.num_user_outputs :]
    assert {facts(node).role for node in saved} <= {Role.SHARD, Role.COMPUTE}
    assert backward.calls(ops.UNSHARD) and not forward.calls(ops.REDUCE_GRAD)
    assert (forward.region, backward.region) == (Region.FORWARD, Region.BACKWARD)


def test_inference_program_has_no_reductions() -> None:
    program = trace_inference(mlp(layout_of(2)))
    assert program.calls(ops.UNSHARD) and not program.calls(ops.REDUCE_GRAD)


def test_small_parameters_and_scalars_are_replicated() -> None:
    specs = specs_of(SHAPES, layout_of(2, 2), small=6)
    sharded = [name for name, spec in specs.items() if spec.layout.sharded]
    assert sharded == ["a.weight", "a.bias", "b.weight"]
    assert specs["scale"].layout.num_replicas == 4
