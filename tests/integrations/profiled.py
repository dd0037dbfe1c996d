"""Small models whose training prints what they compute and send."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zerofx
from tests.hard.wire import watched
from tests.integrations.examples import BASE, nested
from zerofx.torch_private import is_profiling

FLOPS = {"flops_profiler.enabled": True}
COMMS = {"comms_logger.enabled": True, "steps_per_print": 2}


class Block(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Mlp(nn.Module):
    """Blocks, and a graph break after the first if asked for."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in (24, 32, 40))
        self.head, self.breaks = nn.Linear(16, 5), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.blocks[2](self.blocks[1](x))
        return self.head(x).square().mean()


class Attention(nn.Module):
    """One layer of attention over eight places."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).view(-1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2])
        return self.out(mixed.transpose(1, 2).reshape(-1, 8, 16)).square().mean()


MODELS: dict[str, Any] = {"mlp": Mlp, "broken": lambda: Mlp(True), "attention": Attention}


def counted(name: str) -> tuple[int, int]:
    """Forward and backward of the plain model, by torch's own counter."""
    model, x = MODELS[name](), torch.ones(4, 8, 16)
    with FlopCounterMode(display=False) as forward:
        loss = model(x)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def train(name: str, flat: dict[str, Any], steps: int = 4, blocks: bool = False) -> list[Any]:
    """What was printed, and before each step what was counted at the process group."""
    torch.manual_seed(0)
    model = MODELS[name]()
    recipe = zerofx.from_deepspeed(
        nested({**BASE, "gradient_accumulation_steps": 2, "gradient_clipping": 0, **flat}),
        inner="eager",
        min_shard_numel=8,
    )
    zerofx.shard(model, recipe.config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for each in model.blocks if blocks else [model]:
        each.compile(backend=recipe.backend, options=recipe.options)
    scaler, lines = recipe.make_scaler("cpu"), list[Any]()
    report = recipe.make_report(optimizer, scaler, lines.append)
    for _ in range(steps):
        with watched() as wire:
            for _ in range(recipe.batch.accumulation):
                with report.measure("forward"):
                    loss = model(torch.ones(4, 8, 16))
                with report.measure("backward"):
                    recipe.backward(loss, scaler)
            recipe.step(optimizer, scaler)
        lines.append(wire.calls)
        report.step()
    report.close()
    assert not is_profiling()
    return lines


def texts(lines: list[Any], start: str) -> list[str]:
    """What was printed and begins so."""
    return [each for each in lines if isinstance(each, str) and each.startswith(start)]


def rows(text: str, *start: str) -> list[list[str]]:
    """The cells of the lines that begin so."""
    cells = map(str.split, text.splitlines())
    return [row for row in cells if row[: len(start)] == [*start]]
