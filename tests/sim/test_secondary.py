"""Secondary shards in lockstep: all ranks of several nodes in one process."""

from __future__ import annotations

import pytest
import torch

from tests.passes.models import close, compile_all, data_for, expected, mlp
from tests.program_builder import inputs_for
from zerofx.config import ZeroConfig
from zerofx.ir import ops
from zerofx.ir.facts import NODE, Role, facts
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
    forward, backward = compile_all(model, 3, pipeline(config, 1))
    gathers = backward.calls(ops.UNSHARD_START)
    assert gathers and all(facts(start).axis == NODE for start in gathers)
    copies: dict[str, list[torch.Tensor]] = {}
    inputs = inputs_for(model, data.values, data.buffers, data.inputs)
    results = run_lockstep(forward, inputs, secondary=copies)
    assert copies.keys() == {"a.weight", "a.bias", "b.weight"}, "the others are replicated"
    number = forward.num_user_outputs
    given = [[*result[number:], torch.ones_like(result[0])] for result in results]
    inputs_of_backward = backward.graph.find_nodes(op="placeholder")
    for place, node in enumerate(inputs_of_backward):
        if facts(node).role is Role.SHARD and facts(node).param in copies:
            for values in given:  # whoever gathers over all ranks gathers NaN
                values[place] = torch.full_like(values[place], torch.nan)
    gradients = run_lockstep(backward, given, secondary=copies)
    wanted = expected(model, data)
    assert close([result[:number] for result in results], wanted[0])
    assert close(gradients, wanted[1])
