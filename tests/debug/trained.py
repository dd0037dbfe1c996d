"""A model of equal blocks, and a script that trains it: `python trained.py STEPS [RANKS]`.

Its forward prints twice, before there is a graph and between two, and its last batch is larger.
Every RANKS ranks train a model of their own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

OPTIONS: dict[str, Any] = {"inner": "eager"}


class Block(nn.Module):
    """Two layers beside the stream they read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """`depth` blocks; talkative ones print before and behind them."""

    def __init__(self, depth: int = 2, width: int = 64, talks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)
        self.talks = talks

    def forward(self, x: Tensor) -> Tensor:
        if self.talks:
            print("before any operation")
        for block in self.blocks:
            x = block(x)
        if self.talks:
            print("between two graphs")
        return self.head(x).square().mean()


class Talkative(nn.Module):
    """A break in its loop: Dynamo compiles equal blocks once, and runs that graph for each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            print("one more")
        return x.sum()


def _mesh(num: int) -> DeviceMesh:
    ranks = range(dist.get_world_size())
    meshes = [DeviceMesh("cpu", [*ranks[start : start + num]]) for start in ranks[::num]]
    return meshes[dist.get_rank() // num]


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    model = Net(talks=True)
    options = {**OPTIONS, "mesh": _mesh(int(sys.argv[2]))} if sys.argv[2:] else OPTIONS
    step = torch.compile(model, backend="zero3", options=options, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = int(sys.argv[1])
    for number in range(steps):
        step(torch.randn(5 if number == steps - 1 else 4, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
