"""`init_process_group()` without a backend, as in the README, gets the measured algorithms."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zerofx.cost.comm import algorithms_for
from zerofx.runtime.comm import make_comm


def described(backend: str) -> tuple[str, str, object]:
    group = dist.new_group(backend=backend)
    assert group is not None
    comm = make_comm(group, torch.device("cpu"), ranks_per_node=2)
    return dist.get_backend(group), comm.backend, comm.algorithms


def test_a_group_of_several_backends_is_recognised() -> None:
    for theirs, ours, algorithms in run_ranks(2, described, "cpu:gloo"):
        assert theirs != "gloo"
        assert ours == "gloo"
        assert algorithms == algorithms_for("gloo", "cpu", 2, 2)
