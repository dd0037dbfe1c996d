"""A rank that is killed in the middle of a step: the others end with an error that names it."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.faults.dying import OPTIONS, WIDTH, Layers, Stage, train
from tests.logs import heard
from tests.ranks import RanksFailed, run_ranks
from zerofx.runtime.watch import say_last_words


@pytest.mark.parametrize(
    "num_ranks, stage, point, doomed, ranks_per_node",
    [
        (2, 3, "forward", 1, 2),
        (2, 1, "optimizer", 0, 2),
        (4, 3, "backward", 2, 4),
        # Two hops: ranks 0 and 3 share neither node nor column, and never talk to each other.
        (4, 2, "between", 0, 2),
    ],
)
def test_the_others_name_it(
    num_ranks: int, stage: int, point: Stage, doomed: int, ranks_per_node: int
) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(num_ranks, train, stage, doomed, point, ranks_per_node=ranks_per_node)
    failures = failed.value.failures
    kinds = {rank: failure.kind for rank, failure in failures.items()}
    assert kinds.pop(doomed) == "Died"
    others = set(range(num_ranks)) - {doomed}
    assert kinds == dict.fromkeys(others, "RankGoneError"), str(failed.value)
    for rank in others:
        assert failures[rank].message.startswith(f"rank {doomed} is gone: no answer for 0.5 s")


def _reduces_by_hand() -> list[str]:
    """What is logged when a process ends since a collective of its own failed."""
    model = Layers()
    torch.compile(model, backend="zero3", options=OPTIONS)(torch.ones(2, WIDTH))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with heard("zerofx") as words:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            say_last_words(error)
    raise RuntimeError(words[-1])


def test_it_is_named_if_another_collective_fails() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _reduces_by_hand)
    assert failed.value.failures[0].message.startswith("rank 1 is gone")
