"""Point 3: an edit of a weight, however it is made, is seen by the next forward at every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import zerofx
from tests.contract.loops import (
    STAGES,
    close,
    compiled,
    config,
    data,
    full,
    net,
    same,
    sgd,
    sharded,
    train,
    twin,
)
from tests.ranks import run_ranks

Edit = Callable[[Any], None]


def _multiply(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)


def _copy(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.copy_(model.first.weight * 2)
        model.last.bias.detach().add_(1)


def _by_hand(model: Any) -> None:
    # A foreign optimizer: plain Python over the parameters, or one that is no torch Optimizer.
    for param in model.parameters():
        with torch.no_grad():
            param.add_(param.sign(), alpha=-0.1)


def _load_own(model: Any) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def _load_full(model: Any) -> None:
    model.load_state_dict(net(seed=3).state_dict())


def _load_partly(model: Any) -> None:
    plain = net(seed=4).state_dict()
    del plain["last.bias"]
    plain["more"] = torch.zeros(3)
    missing, unexpected = model.load_state_dict(plain, strict=False)
    assert missing == ["last.bias"] and unexpected == ["more"]


def _load_assigned(model: Any) -> None:
    model.load_state_dict(net(seed=5).double().float().state_dict(), assign=True)


def _load_own_assigned(model: Any) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _through_data(model: Any) -> None:
    model.first.weight.data.mul_(2)
    if hasattr(model.first, "_zerofx_states"):
        zerofx.refresh(model)


def _assign_data(model: Any) -> None:
    for param in model.parameters():
        param.data = param.data * 0.9


def _assign_full_data(model: Any) -> None:
    values = torch.linspace(-1, 1, sum(param.numel() for param in model.parameters()))
    nn.utils.vector_to_parameters(values, model.parameters())


def _rows(model: Any) -> None:
    weight = model.first.weight
    with torch.no_grad():
        weight[0] = 5.0
        weight[1].fill_(7.0)
        weight[-1][2].zero_()
        weight[3:5] *= 0.5
        weight[:, 1].add_(1)
        weight[weight > 6] = 3.0
        weight[[4, 7], 2:4] = torch.tensor([1.0, 2.0])
        nn.init.constant_(weight[8:10], 0.25)
    weight.data[-2].zero_()
    weight.data[2, 3] = 4.0


EDITS = [
    _multiply,
    _copy,
    _by_hand,
    _load_own,
    _load_full,
    _load_partly,
    _load_assigned,
    _load_own_assigned,
    _through_data,
    _assign_data,
    _assign_full_data,
    _rows,
]


def _seen(stage: int) -> None:
    """One after the other, of one model that is compiled once."""
    model, plain = net(), net()
    run = compiled(model, stage)
    for edit in EDITS:
        with torch.no_grad():
            close(run(*data(0)), plain(*data(0)), "before")
        edit(model)
        edit(plain)
        same(model, plain)
        with torch.no_grad():
            close(run(*data(0)), plain(*data(0)), f"compiled after {edit.__name__}")
            close(model(*data(0)), plain(*data(0)), f"eager after {edit.__name__}")
        if edit in (_copy, _load_full, _load_assigned, _load_own_assigned):
            ddp = twin(plain)
            train(run, sgd(model), 1)
            train(ddp, sgd(ddp), 1)
            same(model, ddp)
            plain = ddp.module
        assert sharded(model)


@pytest.mark.parametrize("stage", STAGES)
def test_edits_are_seen(stage: int) -> None:
    run_ranks(2, _seen, stage)


def _scale_data(model: Any) -> None:
    for param in model.parameters():
        param.data.mul_(1.5)


def _scale_lists(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.5)


def _seen_after_a_step(stage: int) -> None:
    """Clipped weights, swapped averages: none of these edits changes a version."""
    for edit in (_scale_data, _scale_lists):
        model, ddp = net(), twin(net())
        run = compiled(model, stage)
        for one, trained in ((run, model), (ddp, ddp)):
            train(one, sgd(trained), 1)
            edit(trained)
        with torch.no_grad():
            close(run(*data(1)), ddp(*data(1)), f"{edit.__name__} after a step")


@pytest.mark.parametrize("stage", STAGES)
def test_edits_without_a_trace_are_seen_after_a_step(stage: int) -> None:
    run_ranks(2, _seen_after_a_step, stage)


def _wrong_state_dicts() -> None:
    model = net()
    zerofx.shard(model, config(3))
    before = {name: full(value) for name, value in model.state_dict().items()}
    wrong = net().state_dict()
    wrong["first.weight"] = torch.zeros(12, 7)
    with pytest.raises(RuntimeError, match=r"size mismatch for first.weight"):
        model.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match=r"Missing key.*first.weight"):
        model.load_state_dict({})
    # A file that was loaded to other types.
    model.load_state_dict({name: value.double() for name, value in before.items()})
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        close(full(value), before[name], name)


def test_wrong_state_dicts_fail_as_usual() -> None:
    run_ranks(2, _wrong_state_dicts)


def _unsharded(stage: int) -> None:
    model, plain = net(), net()
    run = compiled(model, stage)
    run(*data(0))
    with zerofx.unshard(model) as values:
        assert list(values) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            close(values[name], value, name, 0)
        values["first.weight"].mul_(3)
        nn.init.ones_(values["last.bias"])
    with torch.no_grad():
        plain.first.weight.mul_(3)
        plain.last.bias.fill_(1)
        close(run(*data(1)), plain(*data(1)), "after writing back")
    with zerofx.unshard(model, writeback=False) as values:
        values["first.weight"].zero_()
    same(model, plain)
    with pytest.raises(KeyError), zerofx.unshard(model) as values:
        values["first.weight"].zero_()
        raise KeyError
    same(model, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_unshard_shows_and_writes_full_values(stage: int) -> None:
    run_ranks(2, _unsharded, stage)


def _optimized(stage: int) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (AdamW, {"eps": 1e-3, "foreach": True}),
        (AdamW, {"eps": 1e-3, "fused": True}),
        (SGD, {"momentum": 0.9, "foreach": True}),
    ]
    for build, kwargs in cases:
        model, ddp = net(), twin(net())
        early = build(model.parameters(), lr=0.05, **kwargs)
        got = train(compiled(model, stage), early, 3)
        want = train(ddp, build(ddp.parameters(), lr=0.05, **kwargs), 3)
        close(torch.tensor(got), torch.tensor(want), f"losses with {build} {kwargs}")
        same(model, ddp)


@pytest.mark.parametrize("stage", [0, 3])
def test_foreach_and_fused_optimizers(stage: int) -> None:
    run_ranks(2, _optimized, stage)


def _accumulated_versions(stage: int) -> None:
    """An edit between forward and backward of two micro-batches is seen by the second forward."""
    model, plain = net(), net()
    run = compiled(model, stage)
    ddp = twin(plain)
    wanted = copy.deepcopy(ddp.module)
    for one in (run, ddp):
        one(*data(0)).backward()
    _multiply(model)
    _multiply(ddp.module)
    for one in (run, ddp):
        one(*data(1)).backward()
    for name, param in model.named_parameters():
        grad = ddp.module.get_parameter(name).grad
        close(full(param.grad), grad, name)
        assert not torch.equal(full(param), wanted.get_parameter(name))


def test_an_edit_between_micro_batches() -> None:
    for stage in STAGES:
        run_ranks(2, _accumulated_versions, stage)
