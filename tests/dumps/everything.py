"""A small model with something of everything, and one step of it; `python everything.py OPTIONS`.

Under torchrun it is a program of its own: what it dumps starts from nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

OPTIONS = {"inner": "eager", "min_shard_numel": 4}
SEED = 3


class Everything(nn.Module):
    """Uneven shards, tied and replicated parameters, buffers, a constant, dropout.

    Modules are called as functions of `plain_ops` end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.start, self.wait = nn.Linear(6, 7), nn.Linear(7, 6)
        self.norm = nn.LayerNorm(6)
        self.batch: nn.Module = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        factors = torch.tensor([0.5, 1.0, 1.5, -1.0, 0.1, 3.0], dtype=self.scale.dtype)
        x = self.embed(tokens) * factors
        x = x + self.wait(torch.dropout(self.start(self.norm(x)).relu(), 0.3, self.training))
        # Its kernel gives transposed values other strides than tracing does: no view joins them.
        x = self.batch(x.unflatten(0, (2, 4)).mT).mT.flatten(0, 1)
        logits = x @ self.embed.weight.t() * self.scale
        return nn.functional.cross_entropy(logits, target)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets of this rank."""
    made = torch.Generator().manual_seed(100 + dist.get_rank())
    tokens, target = torch.randint(0, 11, (2, 8), generator=made)
    return tokens, target


def model() -> Everything:
    torch.manual_seed(0)
    return Everything()


def local(value: Tensor | None) -> Tensor | None:
    """What this rank holds."""
    return value.to_local().clone() if isinstance(value, DTensor) else value


def step(net: nn.Module, stage: int, **options: Any) -> Tensor:
    """Forward and backward."""
    run = torch.compile(net, backend=f"zero{stage}", options={**OPTIONS, **options})
    torch.manual_seed(SEED)
    loss: Tensor = run(*batch())
    loss.backward()
    return loss.detach()


def main() -> None:
    """One step under torchrun."""
    dist.init_process_group("gloo")
    step(model(), 3, **json.loads(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
