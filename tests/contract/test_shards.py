"""What AOTAutograd traces takes shards; everything outside sees `DTensor`s."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.contract.loops import FAST
from tests.ranks import run_ranks
from zerofx.frontend import capture


class _Model(nn.Module):
    """A tied weight, a frozen one, one of a checkpointed region, and one read by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.region = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(torch.tanh(self.again(self.first(x))))
        out: Any = checkpoint(self.region, hidden, use_reentrant=False)
        return out * self.scale + self.region.weight.square().sum()


def _trained(stage: int, **options: Any) -> tuple[list[list[bool]], list[Tensor]]:
    """Which inputs of each graph are `DTensor`s; gradients of the mean over ranks."""
    taken: list[list[bool]] = []

    def spy(module: Any, inputs: Any, **how: Any) -> Any:
        taken.append([isinstance(value, DTensor) for value in inputs])
        return trace(module, inputs, **how)

    trace, seen = capture.trace_and_compile, list[type]()
    model = _Model()
    with mock.patch.object(capture, "trace_and_compile", spy):
        run: Any = torch.compile(model, backend=f"zero{stage}", options={**FAST, **options})
        x = torch.arange(14.0).view(2, 7) / 10 + dist.get_rank()
        out = run(x)
        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: seen.append(type(grad)))
        out.sum().backward()
    assert seen and all(issubclass(kind, DTensor) for kind in seen)
    grads: Any = [param.grad for param in model.parameters() if param.requires_grad]
    assert all(p.grad is None for p in model.frozen.parameters())
    return taken, [grad.full_tensor() for grad in grads]


def _expected() -> list[Tensor]:
    model = _Model()
    for rank in range(2):
        x = torch.arange(14.0).view(2, 7) / 10 + rank
        (model(x).sum() / 2).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_dtensor_is_traced(stage: int) -> None:
    for taken, grads in run_ranks(2, _trained, stage):
        assert taken and not any(map(any, taken))
        for grad, wanted in zip(grads, _expected(), strict=True):
            torch.testing.assert_close(grad, wanted)


def test_gradients_of_a_dtype_of_their_own_need_wrappers() -> None:
    for taken, grads in run_ranks(2, _trained, 3, grad_dtype=torch.bfloat16):
        assert any(map(any, taken))
        for grad, wanted in zip(grads, _expected(), strict=True):
            torch.testing.assert_close(grad.float(), wanted, rtol=2e-2, atol=1e-2)
