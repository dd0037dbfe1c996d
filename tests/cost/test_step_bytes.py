"""What a step of several graphs or micro-batches sends: on the wire, explained and reported."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from benchmarks.meters import WireMeter
from tests.debug.trained import Block, Talkative
from tests.ranks import run_ranks
from zerofx.cost.machine import machine_of

EAGER: dict[str, Any] = {"inner": "eager", "min_shard_numel": 0}
HPZ: dict[str, Any] = {"secondary_shards": True, "ranks_per_node": 2}


class _Net(Block):
    """One of them and a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def _sent(blocks: bool, options: dict[str, Any]) -> tuple[float, int, int]:
    """Bytes that this rank sends in a step; that are explained; and in all reports."""
    torch.compiler.reset()
    torch.manual_seed(0)
    config = zerofx.ZeroConfig(dump="", **EAGER, **options)
    model: nn.Module = Talkative(3) if blocks else _Net(64)
    plain, x = copy.deepcopy(model), torch.ones(4, 64, requires_grad=blocks)
    wire = WireMeter()
    with tempfile.TemporaryDirectory() as folder:
        settings = {**EAGER, **options, "dump": folder}
        run = torch.compile(model, backend=f"zero{settings.pop('stage')}", options=settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            with wire.attached() if step else contextlib.nullcontext():
                for _ in range(config.accumulate):
                    run(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        texts = [path.read_text() for path in Path(folder).glob("graph*/report.json")]
    reported = sum(json.loads(text)["wire_bytes_per_step"] for text in texts)
    size, machine = dist.get_world_size(), machine_of("cpu")
    torch.compiler.reset()
    found = zerofx.explain(plain, x, config=config, world_size=size, machine=machine)
    return wire.sent, found.outcome.sent_bytes, reported


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_step_sends_what_is_explained_and_reported(num_ranks: int) -> None:
    cases: list[tuple[bool, dict[str, Any]]] = [
        (True, {"stage": 3}),
        (True, {"stage": 3, "memory_budget": 2 * 4 * 64 * 256}),
        (False, {"stage": 1, "accumulate": 2}),
        (False, {"stage": 2, "accumulate": 2}),
        (False, {"stage": 3, "accumulate": 2}),
    ]
    spread = [(False, {"stage": 3, "accumulate": 2, **each}) for each in (HPZ, {"replicate": 2})]
    for blocks, options in cases if num_ranks == 2 else spread:
        sent, explained, reported = run_ranks(num_ranks, _sent, blocks, options, timeout=120)[0]
        assert sent == explained > 0, options
        assert blocks or reported == sent, options
