"""An allocator that fails names the bucket and the options; the model goes on where it can.

Ranks limit their own address space, so that the allocator itself fails; nothing is patched.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.hard.pair import EAGER, draw, full
from tests.ranks import RanksFailed, run_ranks
from zerofx.errors import OutOfMemoryError
from zerofx.runtime.handles import live_sessions

WIDTH, ROWS = 1 << 11, 1 << 12  # 32 MiB of weights
_ROOM = 12 << 20
OPTIONS = {**EAGER, "hang_timeout": 1.0}


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process allocate no more than 12 MiB, whatever was freed in it before."""
    gc.collect()
    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[0]) * resource.getpagesize()
    old, hard = resource.getrlimit(resource.RLIMIT_AS)
    holes: list[Tensor] = []
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM // 4, hard))
        with contextlib.suppress(RuntimeError):
            while True:  # malloc gives again what it kept, which no limit counts
                holes.append(torch.empty(_ROOM // 2, dtype=torch.uint8))
        resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (old, hard))


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


def _recovers() -> list[str]:
    """Every rank runs out of memory in the same place; the next step is as if nothing had been."""
    model, step = _trained(2)
    wanted = _gradients(model)
    messages = []
    for where in ("forward", "backward"):
        loss = None if where == "forward" else step(draw(3, 8))
        try:
            with _little_memory():
                if loss is None:
                    step(draw(4000, 8))
                else:
                    loss.backward()  # the gradients of the step before still take their memory
        except torch.OutOfMemoryError as error:
            assert isinstance(error, OutOfMemoryError)
            messages.append(str(error))
        model.zero_grad()
        step(draw(3, 8)).backward()
        for got, want in zip(_gradients(model), wanted, strict=True):
            assert torch.equal(got, want)
    return messages


def test_all_ranks_in_a_computation() -> None:
    for rank, messages in enumerate(run_ranks(2, _recovers)):
        assert len(messages) == 2
        for message in messages:
            assert message.startswith(f"rank {rank} runs out of memory in computation in ")
            assert "you tried to allocate" in message and "take smaller batches" in message
            assert 'use backend="zero3"' in message and "The model can go on" in message


def _first_gather(folder: str) -> str:
    """Of a model that has no memory for gathered values yet; with a folder, on rank 1 alone."""
    model, step = _trained(3)
    model.zero_grad()
    (session,) = (s for s in live_sessions() if s.root() is model)
    session.gathered.abandon()
    message = "memory sufficed"
    limited = contextlib.nullcontext() if folder and dist.get_rank() == 0 else _little_memory()
    try:
        with limited:
            step(draw(3, 8)).backward()
    except OutOfMemoryError as error:
        message = str(error)
    if folder:
        with pytest.raises(OutOfMemoryError, match="cannot go on"):
            step(draw(3, 8))
        Path(folder, "message").write_text(message)
        os._exit(1)
    step(draw(3, 8)).backward()
    return message


def test_all_ranks_in_a_gather() -> None:
    for message in run_ranks(2, _first_gather, ""):
        assert "runs out of memory in gather unshard" in message
        assert "MiB of full values)" in message and "  - large.weight" in message
        assert "lower bucket_bytes or prefetch_bytes" in message


def test_one_rank_alone_cannot_go_on(tmp_path: Path) -> None:
    """Nor can the other one, whose gradients are never mixed with those of another step."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _first_gather, str(tmp_path))
    assert "ranks 0 did not run out there" in (tmp_path / "message").read_text()
    assert failed.value.failures[0].message.startswith("rank 1 is gone")
