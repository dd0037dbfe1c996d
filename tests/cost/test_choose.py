"""`backend="zero"` takes the lowest stage that fits, and the same one on every rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpt import Gpt
from tests.logs import heard
from tests.ranks import run_ranks
from zerofx.config import ZeroConfig
from zerofx.cost.comm import algorithms_for
from zerofx.errors import ConfigError
from zerofx.frontend.choose import least_memory, predicted_peaks
from zerofx.frontend.rehearsal import rehearse_model

BATCH, LENGTH = 2, 32
EAGER: dict[str, Any] = {"inner": "eager", "bucket_bytes": 0}
"""Buckets of a small model would take as much memory as its stages save."""


def _peaks(ranks: int) -> dict[int, int]:
    rehearsal = rehearse_model(
        lambda: Gpt(depth=2),
        lambda: ((torch.zeros(BATCH, LENGTH, dtype=torch.int64),), {}),
        "eager",
    )
    algorithms = algorithms_for("gloo", "cpu", ranks, ranks)
    return dict(predicted_peaks(rehearsal, ZeroConfig(**EAGER), ranks, algorithms))


def _chosen(memory: int | None, **more: Any) -> tuple[int, int, list[str]]:
    """The stage of the session, of its configuration, and what was logged."""
    from zerofx.sharding.shard import session_of

    torch.manual_seed(0)
    model = Gpt(depth=2)
    run = torch.compile(model, backend="zero", options={**EAGER, "device_memory": memory, **more})
    optimizer = torch.optim.AdamW(model.parameters())
    with heard("zerofx.frontend.choose", logging.INFO) as lines:
        for _ in range(2):
            run(torch.randint(1024, (BATCH, LENGTH))).backward()
            optimizer.step()
            optimizer.zero_grad()
    session = session_of(model)
    assert session is not None
    layouts = {state.spec.layout.name for state in session.states}
    torch.compiler.reset()
    return session.config.stage, len(layouts), lines


def test_the_lowest_stage_that_fits() -> None:
    peaks = _peaks(2)
    assert sorted(peaks.values(), reverse=True) == [peaks[stage] for stage in range(4)]
    for stage in (0, 2, 3):
        ranks = run_ranks(2, _chosen, peaks[stage], timeout=220)
        assert [chosen for chosen, _, _ in ranks] == [stage, stage]
        (line,), silent = ranks[0][2], ranks[1][2]
        assert line.startswith(f"zero{stage} is the first to fit") and not silent
    first, _ = run_ranks(2, _chosen, peaks[3] - 1, timeout=220)
    assert first[0] == 3 and first[2][0].startswith("zero3, but no stage fits")


def _by_host() -> tuple[int, int, list[str]]:
    return _chosen(None)


def test_memory_of_the_host_is_what_its_ranks_share() -> None:
    assert least_memory([("a", 96, True), ("a", 96, True), ("b", 60, True)], given=False) == 48
    assert least_memory([("a", 96, False), ("a", 80, False)], given=False) == 80
    assert least_memory([("a", 96, True), ("a", 96, True)], given=True) == 96
    assert [stage for stage, _, _ in run_ranks(2, _by_host, timeout=120)] == [0, 0]


def test_a_whole_configuration_gives_way() -> None:
    stages = run_ranks(1, _chosen, None, config=ZeroConfig(stage=3, inner="eager"), timeout=120)
    assert stages[0][0] == 0


@pytest.mark.parametrize("memory", [-1, "80GB"])
def test_memory_is_a_number_of_bytes(memory: Any) -> None:
    with pytest.raises(ValueError, match="device_memory"):
        ZeroConfig(device_memory=memory)


def _refused() -> None:
    for memory in (1, 1 << 40):  # alike on machines of any size
        for options in ({"secondary_shards": True}, {"quantize_weights": "int8"}):
            with pytest.raises(ConfigError, match=f"{next(iter(options))}.*some stages only"):
                _chosen(memory, **options)


def test_options_of_some_stages_only_are_refused() -> None:
    run_ranks(2, _refused)


def _evaluated() -> list[int]:
    from zerofx.sharding.shard import session_of

    stages = []
    for memory in (1 << 40, 1):
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).requires_grad_(False)
        x = torch.randn(2, 64)
        expected = teacher(x)
        options = {**EAGER, "device_memory": memory}
        assert torch.equal(torch.compile(teacher, backend="zero", options=options)(x), expected)
        session = session_of(teacher)
        assert session is not None
        stages.append(session.config.stage)
    return stages


def test_models_without_a_backward() -> None:
    assert run_ranks(2, _evaluated) == [[0, 3]] * 2
