"""A rank that alone does what all ranks have to do together: the others name it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.contract.loops import FAST, data, net
from tests.ranks import RanksFailed, run_ranks
from zerofx import checkpoint


def _alone(call: str, folder: Path) -> None:
    model = net()
    run = torch.compile(model, backend="zero3", options={**FAST, "hang_timeout": 0.5})
    run(*data(0)).backward()
    if dist.get_rank() == 0:
        if call == "unshard":
            with zerofx.unshard(model):
                pass
        elif call == "full_state_dict":
            checkpoint.full_state_dict(model)
        else:
            checkpoint.save(folder / "saved", model)
    run(*data(1)).backward()


@pytest.mark.parametrize("call", ["unshard", "full_state_dict", "checkpoint.save"])
def test_the_others_name_what_it_does(call: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _alone, call, tmp_path)
    failure = failed.value.failures[1]
    assert failure.kind == "DivergedError"
    assert f"rank 0: {call} of" in failure.message
