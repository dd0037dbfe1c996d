"""The referee on programs of the real frontend: all ranks in one process, against autograd."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from tests.models import batch, make
from zerofx.frontend import capture
from zerofx.ir.facts import Role, facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import identity_source
from zerofx.sim.lockstep import run_lockstep, shards_of

WORLD = 4
F32 = torch.float32


@pytest.fixture
def first_of_four() -> Iterator[None]:
    """This process as rank 0 of four that do not exist."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=WORLD)
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "gpt", "twice", "frozen"])
def test_captured_programs_mean_data_parallelism(
    name: str, stage: int, first_of_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make(name, torch.float64)
    batches = [batch(name, rank, 0, torch.float64) for rank in range(WORLD)]
    results, grads, backward = step_in_lockstep(plain, batches, stage, monkeypatch)
    losses, expected = reference(plain, batches)
    for rank in range(WORLD):
        torch.testing.assert_close(results[rank][0], losses[rank])
        found = named_gradients(backward, grads[rank])
        assert found.keys() == expected.keys()
        for param, grad in found.items():
            mine = shards_of(expected[param], backward.params[param])[rank]
            torch.testing.assert_close(grad, mine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_captured_programs_in_mixed_precision(
    stage: int, first_of_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of fp64, computation in fp32, gradients averaged in bf16, and held in fp32."""
    plain = make("gpt", torch.float64)
    batches = [batch("gpt", rank, 0) for rank in range(WORLD)]
    precision = {"param_dtype": F32, "reduce_dtype": torch.bfloat16, "grad_dtype": F32}
    results, grads, backward = step_in_lockstep(plain, batches, stage, monkeypatch, **precision)
    losses, expected = reference(make("gpt", torch.float64).float(), batches)
    for rank in range(WORLD):
        assert results[rank][0].dtype is F32
        torch.testing.assert_close(results[rank][0], losses[rank])
        for param, grad in named_gradients(backward, grads[rank]).items():
            mine = shards_of(expected[param], backward.params[param])[rank]
            assert grad.dtype is F32
            assert torch.equal(grad, grad.bfloat16().float())
            scale = expected[param].abs().max().item()
            torch.testing.assert_close(grad, mine, rtol=0, atol=2e-2 * scale)


def step_in_lockstep(
    plain: nn.Module,
    batches: list[tuple[Tensor, ...]],
    stage: int,
    monkeypatch: pytest.MonkeyPatch,
    **precision: torch.dtype,
) -> tuple[list[list[Any]], list[list[Any]], Program]:
    """Outputs and gradients of each rank, and the backward program."""
    model = copy.deepcopy(plain)
    programs, order = capture_programs(model, batches[0], stage, monkeypatch, **precision)
    forward, backward = programs[Region.FORWARD], programs[Region.BACKWARD]

    weights = dict(plain.named_parameters(remove_duplicate=False))
    inputs = [
        [value_of(node, rank, forward, weights, order, batches) for node in inputs_of(forward)]
        for rank in range(WORLD)
    ]
    results = run_lockstep(forward, inputs)
    saved = [result[forward.num_user_outputs :] for result in results]
    one = torch.ones_like(results[0][0])
    return results, run_lockstep(backward, [[*each, one] for each in saved]), backward


def capture_programs(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    stage: int,
    monkeypatch: pytest.MonkeyPatch,
    **precision: torch.dtype,
) -> tuple[dict[Region, Program], list[int | None]]:
    """The final programs of one step, and which model input each forward input is."""
    programs: dict[Region, Program] = {}
    order: list[int | None] = []
    real = capture.lower

    def recording(program: Program, *args: Any) -> Any:
        programs[program.region] = program
        run = real(program, *args)

        def boxed(values: list[Any]) -> Any:
            if program.region is Region.FORWARD:
                places = {id(value): place for place, value in enumerate(inputs)}
                order.extend(places.get(id(value)) for value in values)
            return run(values)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    monkeypatch.setattr(capture, "lower", recording)
    options = {"inner": "eager", "min_shard_numel": 0, **precision}
    torch.compile(model, backend=f"zero{stage}", options=options)(*inputs).backward()
    return programs, order


def inputs_of(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def value_of(
    node: fx.Node,
    rank: int,
    program: Program,
    weights: dict[str, nn.Parameter],
    order: list[int | None],
    batches: list[tuple[Tensor, ...]],
) -> Any:
    known = facts(node)
    if known.role is Role.SHARD:
        spec = program.params[known.param]
        return shards_of(weights[known.param].detach(), spec)[rank]
    place = order[inputs_of(program).index(node)]
    return None if place is None else batches[rank][place]


def reference(
    model: nn.Module, batches: list[tuple[Tensor, ...]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each rank's loss, and the mean gradient of every trainable parameter that was used."""
    losses = [model(*inputs) for inputs in batches]
    torch.stack(losses).mean().backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return losses, {name: grad for name, grad in grads.items() if grad is not None}


def named_gradients(program: Program, values: list[Any]) -> dict[str, Tensor]:
    """This rank's gradients by the parameter that their last node concerns."""
    found: dict[str, Tensor] = {}
    for node, value in zip(program.outputs, values, strict=True):
        if isinstance(node, fx.Node) and isinstance(value, Tensor):
            param = facts(identity_source(node)).param
            assert param and param not in found
            found[param] = value
    return found
