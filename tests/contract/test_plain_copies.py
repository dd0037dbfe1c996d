"""Copies of a plain model that its sharded parameters meet later: averages, target networks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import zerofx
from tests.contract.loops import (
    close,
    compiled,
    config,
    data,
    net,
    sgd,
    train,
    twin,
)
from tests.ranks import run_ranks

Update = Callable[[Any, Any, int], object]


def _assign(e: Any, p: Any, step: int) -> None:
    e.data = e.data * 0.9 + p.data * 0.1


# As timm, diffusers, ema_pytorch, torch, BYOL and Fairseq write it.
WAYS: dict[str, Update] = {
    "multiply and add": lambda e, p, step: e.mul_(0.9).add_(p, alpha=0.1),
    "lerp": lambda e, p, step: e.lerp_(p.detach(), 0.1),
    "copy of a sum": lambda e, p, step: e.copy_(0.9 * e + (1 - 0.9) * p),
    "subtract a difference": lambda e, p, step: e.sub_(0.1 * (e - p)),
    "running mean": lambda e, p, step: e.copy_(e + (p.detach() - e) / (step + 1)),
    "foreach lerp": lambda e, p, step: torch._foreach_lerp_([e], [p], 0.1),
    "foreach add": lambda e, p, step: torch._foreach_add_([e], [p], alpha=0.1),
    "assign": _assign,
    "copy": lambda e, p, step: e.data.copy_(p.data),
}


def _averages(stage: int) -> None:
    model, ddp = net(), twin(net())
    ours, theirs = ({way: copy.deepcopy(m) for way in WAYS} for m in (model, ddp.module))
    run, optimizer, wanted = compiled(model, stage), sgd(model), sgd(ddp)
    for step in range(2):
        train(run, optimizer, [step])
        train(ddp, wanted, [step])
        for of, trained in ((ours, model), (theirs, ddp.module)):
            for way, update in WAYS.items():
                with torch.no_grad():
                    for e, p in zip(of[way].parameters(), trained.parameters(), strict=True):
                        update(e, p, step)
    for way in WAYS:
        for got, want in zip(ours[way].parameters(), theirs[way].parameters(), strict=True):
            assert type(got) is nn.Parameter, "a plain copy stays plain"
            close(got.detach(), want.detach(), way)


@pytest.mark.parametrize("stage", [1, 3])
def test_averages_of_a_copy_from_before(stage: int) -> None:
    run_ranks(2, _averages, stage)


def _averaged_models() -> None:
    for average in (get_ema_multi_avg_fn(0.9), get_swa_multi_avg_fn()):
        model, ddp = net(), twin(net())
        ours = AveragedModel(model, multi_avg_fn=average)
        theirs = AveragedModel(ddp.module, multi_avg_fn=average)
        run, optimizer, wanted = compiled(model, 3), sgd(model), sgd(ddp)
        for step in range(3):
            train(run, optimizer, [step])
            train(ddp, wanted, [step])
            ours.update_parameters(model)
            theirs.update_parameters(ddp.module)
        for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
            close(got.detach(), want.detach(), "average")


def test_averaged_models_from_before() -> None:
    run_ranks(2, _averaged_models)


def _compared() -> None:
    model, before = net(), net()
    zerofx.shard(model, config(3))
    param: Tensor = model.first.weight
    plain = before.first.weight.detach()
    model.load_state_dict(before.state_dict())
    assert torch.equal(param, plain) and torch.allclose(plain, param)
    before.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert not (param - plain).any() and (param == plain).all()
    compiled(model, 3)(*data(0)).backward()


def test_comparisons_with_a_copy_from_before() -> None:
    run_ranks(2, _compared)
