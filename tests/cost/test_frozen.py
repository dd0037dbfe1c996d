"""Frozen parameters, as under adapters, are predicted as ranks treat them: bytes, and formulas."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from benchmarks.meters import WireMeter
from tests.ranks import run_ranks
from zerofx.cli.main import main
from zerofx.cost.compute import Roofline
from zerofx.cost.link import Link
from zerofx.cost.machine import Machine
from zerofx.debug.explanation import Explanation
from zerofx.frontend.report import wire_bytes_per_step

WIDTH, RANKS = 128, 2
ADAPTED = WIDTH * 16 * 2
LAYER = WIDTH * WIDTH + WIDTH


class Adapted(nn.Module):
    """Layers, all frozen but some of the first, a pair of low rank that trains, one unread."""

    def __init__(self, trained: int = 0) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.base[trained:].requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.base:
            x = torch.tanh(layer(x))
        return (x + self.up(self.down(x))).square().mean()


MACHINE = Machine("cpu", Roofline(1e12, 1e12), Link(1e9, 0.0))
OPTIONS: dict[str, Any] = {"inner": "eager", "bucket_bytes": 1 << 22, "min_shard_numel": 1024}


@functools.cache
def explained(stage: Any, trained: int = 0) -> Explanation:
    config = zerofx.ZeroConfig(stage=stage, dump="", **OPTIONS)
    x = torch.zeros(4, WIDTH)
    return zerofx.explain(Adapted(trained), x, config=config, world_size=RANKS, machine=MACHINE)


def _measured(stage: int, trained: int) -> float:
    torch.manual_seed(0)
    model = Adapted(trained)
    run = torch.compile(model, backend=f"zero{stage}", options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters())  # frozen ones too, which have no gradients
    wire = WireMeter()
    for step in range(3):
        if step == 2:
            with wire.attached():
                run(torch.ones(4, WIDTH)).backward()
        else:
            run(torch.ones(4, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wire.sent


@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_sends_what_is_predicted(stage: int, trained: int) -> None:
    """Copies of frozen parameters stay, those in one bucket with others that train, too."""
    found = explained(stage, trained)
    assert set(run_ranks(RANKS, _measured, stage, trained)) == {found.outcome.sent_bytes}
    assert sum(each.wire_bytes for each in found.collectives) == found.outcome.sent_bytes
    assert wire_bytes_per_step(list(found.reports.values())) == found.outcome.sent_bytes


def test_what_is_not_sent_takes_no_time() -> None:
    every, some = explained(1, 4).outcome, explained(1, 0).outcome
    assert some.times.exposed < every.times.exposed / 8
    assert some.times.exposed <= some.sent_bytes / MACHINE.link.bytes_per_second + 1e-9
    report = explained(1, 1).reports["forward"]
    (gather,) = (each for each in report["collectives"] if each["kind"] == "unshard")
    layers = 4 * (ADAPTED + 4 * WIDTH * WIDTH) // RANKS
    assert gather["wire_bytes"] == layers > gather["bytes_per_step"]
    assert gather["bytes_per_step"] == 4 * (ADAPTED + WIDTH * WIDTH) // RANKS


def test_formulas_count_what_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", "tests.cost.test_frozen:Adapted", "--input", f"float32[B,{WIDTH}]"]
    ask += ["--batch", "4", "--world-size", str(RANKS)]
    main([*ask, "--json"])
    plan = json.loads(capsys.readouterr().out)
    main(ask)
    text = capsys.readouterr().out
    assert (plan["num_params"], plan["num_trained_params"]) == (5 * LAYER + ADAPTED, ADAPTED)
    assert "Ψ = 86.7 k parameters, τ = 4.10 k of them trained" in text
    assert plan["unread_params"] == ["idle.weight", "idle.bias"]
    assert "Forward never reads idle.weight and 1 other parameter" in text
    known = {"Ψ": plan["num_params"], "τ": ADAPTED, "W": RANKS}
    for stage, found in plan["stages"].items():
        line = re.search(rf"zero{stage}  states (.*), activations .*, sent (.*)", text)
        assert line is not None
        # Beside the gradients, some of which are still there twice at the peak.
        states = eval(line[1], known)
        grads = 4 * ADAPTED / (RANKS if stage in "23" else 1)
        assert eval(found["states_formula"], known) == states
        assert states - grads == pytest.approx(found["params"] + found["optimizer"], rel=0.01)
        # Backward does not gather what it does not read, and nothing gathers what nobody reads.
        least = eval(line[2], known) - (6 * 4 * LAYER / RANKS if stage == "3" else 0)
        assert found["sent_bytes"] == pytest.approx(least, rel=0.06)


class Tied(nn.Module):
    """Two graphs read one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.one = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(self.one(x))
        torch._dynamo.graph_break()
        return self.both(y).square().mean()


def _steps_of_tied(stage: int) -> float:
    torch.manual_seed(0)
    model = Tied()
    run = torch.compile(model, backend=f"zero{stage}", options=OPTIONS)
    optimizer, wire = torch.optim.AdamW(model.parameters()), WireMeter()
    for step in range(3):
        with wire.attached() if step == 2 else contextlib.nullcontext():
            run(torch.ones(4, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wire.sent


@pytest.mark.parametrize("stage", [1, 2])
def test_graphs_share_resident_copies(stage: Any) -> None:
    config = zerofx.ZeroConfig(stage=stage, dump="", **OPTIONS)
    x = torch.zeros(4, WIDTH)
    found = zerofx.explain(Tied(), x, config=config, world_size=RANKS, machine=MACHINE)
    assert found.captured.graphs == 2
    sent = found.outcome.sent_bytes
    assert set(run_ranks(RANKS, _steps_of_tied, stage)) == {sent}
    assert sum(each.wire_bytes for each in found.collectives) == sent
    seconds = sum(each.seconds for each in found.collectives)
    assert seconds == pytest.approx(sent / MACHINE.link.bytes_per_second)
