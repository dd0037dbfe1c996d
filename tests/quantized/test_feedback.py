"""Feedback of coding errors on real ranks: what it brings, and what becomes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.hard.pair import full
from tests.quantized.test_values import NODES, Weights, grads_of
from tests.ranks import run_ranks
from zerofx.ir.kernels import reduce_kernels
from zerofx.ir.parcels import Codec
from zerofx.passes.quantize_reduces import QuantizeReduces
from zerofx.runtime import feedback
from zerofx.sharding.shard import session_of
from zerofx.sim.quantized import reduce_quantized, zero_errors

CODEC = "int4x64.feedback"


class Run:
    """A model whose gradients are given: the same ones, unless told otherwise."""

    def __init__(self, codec: str, **options: Any) -> None:
        torch.compiler.reset()
        self.model = Weights()
        settings = {"inner": "eager", "quantize_exact": (), "quantize_gradients": codec, **options}
        self._run = torch.compile(self.model, backend="zero3", options=settings)

    def step(self, bad: float | None = None) -> list[Tensor | None]:
        """Full gradients of one backward; `bad` is in rank 0's first."""
        given = grads_of(dist.get_rank())
        if bad is not None and dist.get_rank() == 0:
            given[0][0, 0] = bad
        self.model.zero_grad()
        self._run(given)[0].backward()
        return [full(weight.grad) for weight in self.model.weights]


def _steps(codec: str, count: int, per_node: int) -> dict[str, Any]:
    run = Run(codec, ranks_per_node=per_node)
    sent = [run.step() for _ in range(count)]
    session = session_of(run.model)
    assert session is not None
    kept = session.codes.errors._buckets.values()
    held = sum(e.nbytes for each in kept for hop in each.errors for e in hop)
    return {"sent": sent, "specs": [state.spec for state in session.states], "held": held}


@pytest.mark.parametrize(("nodes", "local"), NODES[1:])
def test_means_of_many_steps_are_nearer_and_bits_are_those_of_lockstep(
    nodes: int, local: int
) -> None:
    given = [grads_of(rank) for rank in range(4)]
    wanted = [torch.stack(each).mean(0) for each in zip(*given, strict=True)]
    found = run_ranks(4, _steps, CODEC, 20, local, timeout=120)[0]
    without = run_ranks(4, _steps, "int4x64", 20, local, timeout=120)[0]

    def off(sent: list[list[Tensor]]) -> float:
        means = [torch.stack(each).mean(0) for each in zip(*sent, strict=True)]
        return sum(float((a - b).square().sum()) for a, b in zip(means, wanted, strict=True))

    assert off(found["sent"]) < off(without["sent"]) / 25, "a fifth in L2"
    counted = sum(QuantizeReduces(CODEC, CODEC).kept_bytes(spec) for spec in found["specs"])
    assert found["held"] == pytest.approx(counted, rel=0.02)
    codec = Codec.parse(CODEC)
    kernels = reduce_kernels(found["specs"], codec, codec, nodes)
    errors = zero_errors(kernels)
    flat = [[grad.reshape(-1) for grad in one] for one in given]
    for sent in found["sent"]:
        reduced = reduce_quantized(kernels, flat, errors=errors)
        for place, grad in enumerate(sent):
            chunks = torch.cat([one[place] for one in reduced])[: grad.numel()]
            assert torch.equal(grad, chunks.view(grad.shape))


def _equal(found: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def _far(found: list[Tensor | None], wanted: list[Tensor | None]) -> float:
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    return (off / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


def _events() -> None:
    plain = Run(CODEC)
    steps = [plain.step() for _ in range(5)]
    assert not _equal(steps[0], steps[1])
    names = set(Weights().state_dict())

    run = Run(CODEC)
    assert _equal(run.step(), steps[0]) and _equal(run.step(), steps[1])
    assert set(run.model.state_dict()) == names, "nothing of it is in a checkpoint"
    # Errors belong to gradients: new weights leave them alone.
    run.model.load_state_dict({k: 2 * v for k, v in run.model.state_dict().items()})
    assert _equal(run.step(), steps[2])
    # Another bucket has its own; the one that made no gradient goes on where it was.
    run.model.weights[2].requires_grad_(False)
    first = run.step()
    assert first[2] is None and _far(first, steps[0]) < 0.2
    run.model.weights[2].requires_grad_(True)
    assert _equal(run.step(), steps[3])
    # A step whose gradients overflow, of which only one block is not finite, does not last.
    for bad in (torch.inf, torch.nan, 1e30):
        run.step(bad)
        assert _far(run.step(), steps[0]) < 0.25
    zerofx.refresh(run.model)
    assert _equal(run.step(), steps[0]), "zeros again"
    run.model.weights[2] = nn.Parameter(full(run.model.weights[2]))
    assert _equal(run.step(), steps[0]), "a parameter that takes the place of another has its own"
    _forgotten(run, steps)


def _forgotten(run: Run, steps: list[list[Tensor | None]]) -> None:
    with _constant("FORGET_AFTER", 3):
        run.model.weights[2].requires_grad_(False)
        for _ in range(4):
            run.step()
        run.model.weights[2].requires_grad_(True)
        assert _equal(run.step(), steps[0]), "its memory was given up"
    with _constant("RESET_AFTER", 2):
        assert _equal(run.step(), steps[1]) and _equal(run.step(), steps[0])


@contextlib.contextmanager
def _constant(name: str, value: int) -> Iterator[None]:
    with mock.patch.object(feedback, name, value):
        yield


def test_what_becomes_of_errors() -> None:
    run_ranks(2, _events, timeout=120)
