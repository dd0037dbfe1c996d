"""Secondary shards in lockstep: all ranks of several nodes in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.models import close, compile_all, data_for, expected, mlp
from tests.program_builder import inputs_for
from zerofx.config import ZeroConfig
from zerofx.ir import ops
from zerofx.ir.facts import NODE, Role, facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Layout
from zerofx.passes.pipelines import pipeline
from zerofx.sim.lockstep import run_lockstep


@pytest.mark.parametrize("budget", [0, None])
@pytest.mark.parametrize(("shards", "node_size", "replicas"), [(4, 2, 1), (6, 3, 1), (4, 2, 2)])
def test_backward_needs_no_more_than_what_its_node_holds(
    shards: int, node_size: int, replicas: int, budget: int | None
) -> None:
    layout = Layout(2, shards, replicas, False, node_size=node_size, secondary=True)
    model, config = mlp(layout), ZeroConfig(secondary_shards=True, memory_budget=budget)
    data = data_for(model, shards * replicas, same_buffers=True)
    forward, backward = compile_all(model, 3, pipeline(config))
    gathers = backward.calls(ops.UNSHARD_START)
    assert gathers and all(facts(start).axis == NODE for start in gathers)
    copies: dict[str, list[torch.Tensor]] = {}
    inputs = inputs_for(model, data.values, data.buffers, data.inputs)
    results = run_lockstep(forward, inputs, secondary=copies)
    assert copies.keys() == {"a.weight", "a.bias", "b.weight"}, "the others are replicated"
    number = forward.num_user_outputs
    gradients = _backward(forward, backward, results, copies)
    wanted = expected(model, data)
    assert close([result[:number] for result in results], wanted[0])
    assert close(gradients, wanted[1])


def _backward(
    forward: Program, backward: Program, results: list[list[Any]], copies: dict[str, list[Tensor]]
) -> list[list[Any]]:
    """Gradients; whoever gathers over all ranks what there are copies of gathers NaN."""
    number = forward.num_user_outputs
    given = [[*result[number:], torch.ones_like(result[0])] for result in results]
    for place, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        if facts(node).role is Role.SHARD and facts(node).param in copies:
            for values in given:
                values[place] = torch.full_like(values[place], torch.nan)
    return run_lockstep(backward, given, secondary=copies)


@pytest.mark.parametrize(("shards", "node_size", "replicas"), [(4, 2, 1), (6, 3, 1), (4, 2, 2)])
def test_codes_that_a_node_keeps_are_those_that_forward_received(
    shards: int, node_size: int, replicas: int
) -> None:
    layout = Layout(2, shards, replicas, False, node_size=node_size)
    kept = dataclasses.replace(layout, secondary=True, secondary_codes=True)
    options: dict[str, Any] = {"quantize_weights": "int4x32.asymmetric", "memory_budget": 0}
    found = []
    for each, secondary in ((layout, False), (kept, "codes")):
        model = mlp(each)
        config = ZeroConfig(**options, secondary_shards=secondary)  # type: ignore[arg-type]
        forward, backward = compile_all(model, 3, pipeline(config))
        data = data_for(model, shards * replicas, same_buffers=True)
        inputs = inputs_for(model, data.values, data.buffers, data.inputs)
        copies: dict[str, list[Tensor]] = {}
        results = run_lockstep(forward, inputs, secondary=copies)
        gradients = _backward(forward, backward, results, copies)
        found.append([result[: forward.num_user_outputs] for result in results] + gradients)
    gathers = backward.calls(ops.UNSHARD_START)
    assert {facts(start).axis for start in gathers} == {NODE}
    assert {codes.dtype for codes in copies["a.weight"]} == {torch.uint8}
    assert copies["a.bias"][0].dtype is torch.float64, "one dimension stays exact"
    for exact, ours in zip(*found, strict=True):
        for one, other in zip(exact, ours, strict=True):
            assert one is other or torch.equal(one, other)
