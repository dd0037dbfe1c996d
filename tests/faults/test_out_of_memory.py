"""An allocator that fails names the bucket and the options; the model goes on where it can.

Ranks limit their own address space, so that the allocator itself fails; nothing is patched.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.hard.pair import EAGER, draw, full
from tests.ranks import RanksFailed, run_ranks
from zerofx.errors import OutOfMemoryError

WIDTH, ROWS = 1 << 11, 1 << 12  # 32 MiB of weights
_ROOM = 12 << 20
OPTIONS = {**EAGER, "hang_timeout": 1.0}


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process allocate no more than 12 MiB."""
    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


class Wide(nn.Module):
    """A small layer and a large one, which has a bucket to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(8, WIDTH)
        self.large = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(torch.tanh(self.small(x))).square().mean()


def _trained(stage: int) -> tuple[nn.Module, Any]:
    """A model whose programs are there, but whose memory is not: its gradients were dropped."""
    torch.manual_seed(0)
    model = Wide()
    step: Any = torch.compile(model, backend=f"zero{stage}", options=OPTIONS, dynamic=True)
    step(draw(3, 8)).backward()
    return model, step


def _gradients(model: nn.Module) -> list[Tensor]:
    return [full(param.grad) for param in model.parameters()]


def _recovers(stage: int, where: str) -> str:
    """Every rank runs out of memory in the same place; the next step is as if nothing had been."""
    model, step = _trained(stage)
    wanted = _gradients(model)
    try:
        if where == "computation":
            with _little_memory():
                step(draw(4000, 8))
        else:
            # Gradients of the step before still hold the memory of reductions.
            loss = step(draw(3, 8))
            with _little_memory():
                loss.backward()
    except torch.OutOfMemoryError as error:
        assert isinstance(error, OutOfMemoryError)
        message = str(error)
    model.zero_grad()
    step(draw(3, 8)).backward()
    for got, want in zip(_gradients(model), wanted, strict=True):
        assert torch.equal(got, want)
    return message


@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_in_a_computation(stage: int) -> None:
    for rank, message in enumerate(run_ranks(2, _recovers, stage, "computation")):
        assert message.startswith(f"rank {rank} runs out of memory in computation in ")
        assert "you tried to allocate" in message and "take smaller batches" in message
        assert "prefetch_bytes" in message if stage == 3 else 'use backend="zero2"' in message
        assert "The model can go on" in message


def test_all_ranks_in_a_backward() -> None:
    for message in run_ranks(2, _recovers, 2, "backward"):
        assert "runs out of memory in" in message and "The model can go on" in message


def _first_gather(alone: bool) -> str:
    """Of a model whose large layer was never gathered."""
    _trained(3)  # what torch allocates once in a process
    model = Wide()
    step: Any = torch.compile(model, backend="zero3", options={**OPTIONS, "prefetch_bytes": 0})
    step(draw(3, 8)).backward()
    model.zero_grad()
    limited = _little_memory() if not alone or dist.get_rank() == 1 else contextlib.nullcontext()
    session: Any = model.large.weight._zerofx_owner.state.domain.session
    session.pool.abandon()
    try:
        with limited:
            step(draw(3, 8)).backward()
    except OutOfMemoryError as error:
        message = str(error)
        if not alone:
            step(draw(3, 8)).backward()
            return message
        with pytest.raises(OutOfMemoryError, match="cannot go on"):
            step(draw(3, 8))
        raise
    return ""


def test_all_ranks_in_a_gather() -> None:
    for message in run_ranks(2, _first_gather, False):
        assert "runs out of memory in gather unshard" in message
        assert "(32.0 MiB of full values)" in message
        assert "  - large.weight" in message and "lower bucket_bytes or prefetch_bytes" in message


def test_one_rank_alone_cannot_go_on() -> None:
    """The other one learns that it is gone, or out of step; it never mixes gradients."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _first_gather, True)
    failures = failed.value.failures
    assert failures[1].kind == "OutOfMemoryError" and "ranks 0 did not" in failures[1].message
    assert failures[0].kind in ("RankGoneError", "Hung"), str(failed.value)
