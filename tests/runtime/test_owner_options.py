"""What optimizers remember for all parameters: carried from step to step, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.contract.loops import compiled, refused
from tests.models import batch
from tests.ranks import run_ranks
from tests.runtime.owned import (
    Counting,
    compare,
    make_model,
    trained,
)
from zerofx import OwnerOptimizer, checkpoint
from zerofx.errors import ShardingError, UnsupportedError

COUNTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "group": lambda saved: saved["param_groups"][0]["count"],
    "tensor in group": lambda saved: saved["param_groups"][0]["count"],
    "state": lambda saved: saved["state"]["k"],
}


@pytest.mark.parametrize("where", COUNTS)
def test_counts_of_all_parameters(where: str) -> None:
    """What all owners write for all parameters counts on, as in one process."""
    compare(2, f"counting in {where}", 3)
    assert run_ranks(2, _count_after, where, 3) == [3, 3]


def _count_after(where: str, steps: int) -> int:
    _, optimizer = trained(f"counting in {where}", 3, steps)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return int(COUNTS[where](optimizer.state_dict()))


def _saved_with_foreign_keys(path: Path) -> None:
    model, optimizer = trained("counting in state", 3, 1)
    with refused("'k'", "save the model alone", kind=UnsupportedError):
        checkpoint.save(path, model, optimizer)


def test_checkpoints_name_keys_that_are_no_parameters(tmp_path: Path) -> None:
    run_ranks(2, _saved_with_foreign_keys, tmp_path / "saved")


def _does_not_fit(where: str, message: str) -> None:
    model = make_model()
    optimizer = OwnerOptimizer(model.parameters(), Counting, where=where)
    compiled(model, 3)(*batch("mlp", dist.get_rank(), 0)).backward()
    with refused(message, kind=ShardingError):
        optimizer.step()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("itself", "remembers what is lost\n  - number"),
        ("its tensor", "remembers what is lost\n  - tensor"),
        ("state of its tensor", "state of tensors that are no parameters"),
        ("norms", "owners wrote different values to group 0"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(where: str, message: str) -> None:
    run_ranks(2, _does_not_fit, where, message)
