"""Ranks of one machine share the work of compiling, and wait for nobody without need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from tests.hard.pair import draw
from tests.ranks import run_ranks
from zerofx.torch_private import in_turns, turns


class Unusual(nn.Module):
    """What no other test compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 19), nn.Softplus(beta=1.37), nn.Linear(19, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sinc(self.layers(x)).square().mean()


def _found_and_made() -> tuple[int, int]:
    """How many compiled segments came from Inductor's cache here, and how many did not."""
    counters.clear()
    torch.compile(Unusual(), backend="zero3", options={"min_shard_numel": 0})(draw(3, 8)).backward()
    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def test_each_segment_is_compiled_by_one_rank() -> None:
    found, made = zip(*run_ranks(2, _found_and_made), strict=True)
    assert sum(made) == sum(found) == found[0] + made[0] > 1


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Locks as other processes would hold them."""
    monkeypatch.setattr(turns, "get_lock_dir", lambda: str(tmp_path))
    return lambda text: turns._acquired(text, 0)


def test_others_are_waited_for_last(locks: Callable[[str], Any]) -> None:
    lock, done = locks("first"), []

    def second() -> str:
        done.append("second")
        lock.release()
        return "2"

    jobs: dict[str, Callable[[], str]] = {
        "first": lambda: done.append("first") or "1",
        "second": second,
    }
    assert list(in_turns(jobs).items()) == [("first", "1"), ("second", "2")]
    assert done == ["second", "first"]
    assert all(locks(text) is not None for text in jobs)


def test_a_failure_leaves_no_lock(locks: Callable[[str], Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        in_turns({"only": lambda: 1 / 0})
    assert locks("only") is not None


def test_one_who_never_ends_and_no_cache(locks: Callable[[str], Any]) -> None:
    held = locks("taken")
    with inductor_config.patch(file_lock_timeout=0.2):
        assert in_turns({"taken": lambda: 3}) == {"taken": 3}
    with inductor_config.patch(force_disable_caches=True):
        assert in_turns({"taken": lambda: 4}) == {"taken": 4}
    held.release()
