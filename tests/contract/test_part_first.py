"""A part of a model is sharded first, and then the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerofx
from tests.contract.loops import config
from tests.ranks import run_ranks
from zerofx.errors import ShardingError


def _part_first(stage: int) -> None:
    options = config(stage, param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(2, 8)
    zerofx.shard(model[0], options)
    assert model[0](x).dtype is torch.float64
    assert zerofx.shard(model, options)(x).dtype is torch.float64
    assert model[0](x.to(torch.bfloat16)).dtype is torch.bfloat16
    names = [name for name, _ in model.named_parameters()]
    with zerofx.unshard(model.parameters()) as values:
        assert list(values) == names
    model[1].more = nn.Linear(8, 4)
    zerofx.shard(model[1], options)
    with zerofx.unshard(model[1].more.parameters()) as values:
        assert list(values) == ["1.more.weight", "1.more.bias"]
    other = zerofx.shard(nn.Sequential(nn.Linear(8, 8)), options)
    params = [*model.parameters(), *other.parameters()]
    with pytest.raises(ShardingError, match="of several models have one name"):
        zerofx.unshard(params).__enter__()
    wider = nn.ModuleDict({"inner": model, "own": nn.Linear(8, 8)})
    wider.forward = lambda x: wider["inner"](wider["own"](x))  # pyright: ignore
    torch._dynamo.reset()
    with pytest.raises(ShardingError, match="cast_forward_inputs, output_dtype"):
        torch.compile(wider, backend=f"zero{stage}")(x)


def test_a_model_of_which_a_part_was_sharded_first() -> None:
    """Names, and what is cast at the border, are those of the whole."""
    run_ranks(2, _part_first, 3)
