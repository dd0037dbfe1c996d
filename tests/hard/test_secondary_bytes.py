"""What secondary shards (hpZ) send and hold, measured from outside, and where they are refused."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from benchmarks.accounting import measure
from tests.hard.pair import EAGER, draw
from tests.hard.wire import Wire, watched
from tests.ranks import run_ranks
from zerofx.cost.memory import FP32_ADAM, states
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.frontend.layouts import describe_params, lay_out
from zerofx.runtime.collectives import all_gather
from zerofx.runtime.secondary import node_comm
from zerofx.sharding.shard import session_of

NODES = {**EAGER, "ranks_per_node": 2}
STRICT = {**NODES, "bucket_bytes": 200, "memory_budget": 0}
# What is sent across nodes depends on it; here they share a fast one.
on_slow_links = patch("zerofx.runtime.network.two_hops_pay", lambda *_: True)


def _sent(wire: Wire) -> tuple[int, int]:
    """Bytes of messages to other nodes, and inside this one."""
    node = dist.get_rank() // 2
    inside = sum(size for to, size in wire.sent_to.items() if to // 2 == node)
    return sum(wire.sent_to.values()) - inside, inside


def _frozen_stack(options: dict[str, Any]) -> tuple[Any, Tensor]:
    """Weights of 8 × 8 that need no gradient: backward gathers them, and reduces nothing."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(8, 1)).requires_grad_(False)
    run = torch.compile(model, backend="zero3", options={**STRICT, **options})
    return run, draw(2, 8).requires_grad_()


@on_slow_links
def _gathers(secondary: bool | str, **options: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    run, x = _frozen_stack({"secondary_shards": secondary, "min_shard_numel": 64, **options})
    run(x).sum().backward()
    with watched() as forward:
        loss = run(x).sum()
    with watched() as backward:
        loss.backward()
    return _sent(forward), _sent(backward)


def test_backward_gathers_send_nothing_across_nodes() -> None:
    quarter, half = 64 * 4 // 4, 64 * 4 // 2
    # In two hops a rank sends its chunk once to the other node, and two chunks inside its own.
    everywhere = 3 * quarter, 3 * 2 * quarter
    assert run_ranks(4, _gathers, False, timeout=120) == [(everywhere, everywhere)] * 4
    assert run_ranks(4, _gathers, True, timeout=120) == [(everywhere, (0, 3 * half))] * 4


def test_codes_are_gathered_inside_the_node() -> None:
    one = 16 + 16  # bytes of a parcel: 32 codes of 4 bits, and scales
    options = {"quantize_weights": "int4x32"}
    everywhere, inside = (3 * one, 3 * 2 * one), (0, 3 * 2 * one)
    assert run_ranks(4, _gathers, "codes", timeout=120, **options) == [(everywhere, inside)] * 4
    numbers = (0, 3 * 64 * 4 // 2)
    assert run_ranks(4, _gathers, True, timeout=120, **options) == [(everywhere, numbers)] * 4


def _kept(options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of secondary shards on this rank, and what a plan counts."""
    model = nn.Sequential(nn.Embedding(40, 9), nn.Linear(9, 33), nn.LayerNorm(33))
    config = zerofx.ZeroConfig(**{**STRICT, **options, "min_shard_numel": 0})
    plain = describe_params(model)
    run = torch.compile(zerofx.shard(model, config), backend="zero3")
    run(torch.zeros(2, dtype=torch.int64)).sum().backward()
    session = session_of(model)
    assert session is not None and session.sharded.secondary is not None
    with_copies, without = (
        states(lay_out(plain, each, 4), FP32_ADAM).params
        for each in (config, dataclasses.replace(config, secondary_shards=False))
    )
    return session.sharded.secondary.num_bytes, with_copies - without


def test_a_plan_counts_codes_where_codes_are_kept() -> None:
    coded = {"quantize_weights": "int8x64.asymmetric", "secondary_shards": "codes"}
    numbers = {"quantize_weights": "int8x64.asymmetric", "secondary_shards": True}
    sizes = {}
    for name, options in (("codes", coded), ("numbers", numbers)):
        for held, planned in run_ranks(4, _kept, options, timeout=120):
            assert held == planned
            sizes[name] = held
    # The matrix of 33 rows, 9 on each of four ranks: 81 numbers are two blocks.
    assert sizes["numbers"] - sizes["codes"] == -(-33 * 9 // 2) * 4 - 2 * (2 * 64 + 2 * 16)


@on_slow_links
def _micro_batches() -> list[int]:
    """Bytes across nodes of the forward of each micro-batch, two steps of three."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    options = {**STRICT, "secondary_shards": True, "accumulate": 3}
    run = torch.compile(model, backend="zero3", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent = []
    for number in range(6):
        with watched() as wire:
            loss = run(draw(2, 8)).sum()
        loss.backward()
        sent.append(_sent(wire)[0])
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return sent


def test_only_the_first_micro_batch_of_a_step_crosses_nodes() -> None:
    first = 2 * 64 * 4 // 4
    assert run_ranks(4, _micro_batches, timeout=120) == [[first, 0, 0] * 2] * 4


def _at_rest(**options: Any) -> float:
    found = measure(3, (1,), width=32, depth=1, ranks_per_node=2, **options)
    return found.in_psi(found.at_rest)


def test_memory_grows_by_the_model_divided_by_the_ranks_of_a_node() -> None:
    (without, *_) = run_ranks(4, _at_rest, timeout=120)
    (mixed, *_) = run_ranks(
        4, _at_rest, secondary_shards=True, param_dtype=torch.bfloat16, timeout=120
    )
    assert mixed - without == pytest.approx(2 / 2, abs=0.01)


def _refused() -> list[str]:
    messages = []
    for options in ({"ranks_per_node": 4}, {"ranks_per_node": 1}, {"replicate": 2}):
        config = zerofx.ZeroConfig(**{**NODES, **options, "secondary_shards": True})
        with pytest.raises(UnsupportedError) as error:
            zerofx.shard(nn.Linear(4, 4), config)
        messages.append(str(error.value))
    return messages


def test_refused_where_they_could_not_serve() -> None:
    one_node, alone, groups = run_ranks(4, _refused)[0]
    assert "all 4 ranks that share the parameters are on one node" in one_node
    assert "leave secondary_shards out" in one_node
    assert "alone on their nodes, or nodes hold unequal numbers" in alone
    assert "all 2 ranks that share the parameters are on one node" in groups
    with pytest.raises(ConfigError, match="no meaning at stage 2"):
        zerofx.ZeroConfig(stage=2, secondary_shards=True)
    with pytest.raises(ConfigError, match=r"(?s)secondary_shards='int8' is not.*\"codes\""):
        zerofx.ZeroConfig(secondary_shards="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'(?s)"codes" has no meaning.*quantize_weights="int8"'):
        zerofx.ZeroConfig(secondary_shards="codes", quantize_gradients="int8")


def _by_the_backend() -> bool:
    """The group that a backend's own gather needs, on gloo."""
    session = session_of(zerofx.shard(nn.Linear(8, 8), zerofx.ZeroConfig(**NODES)))
    assert session is not None
    comm = dataclasses.replace(session.axes.shard, backend="other")
    node = node_comm(comm, session.device)
    out = torch.empty(4)
    session.wait(all_gather([out], [torch.full((2,), float(dist.get_rank()))], node, 0))
    first = dist.get_rank() // 2 * 2
    return node.ranks == (first, first + 1) and out.tolist() == [first] * 2 + [first + 1] * 2


def test_the_ranks_of_a_node_gather_through_a_group_of_their_own() -> None:
    assert run_ranks(4, _by_the_backend) == [True] * 4
