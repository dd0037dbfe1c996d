"""Point 3: modules and classes of every sort behave as before, and reading communicates nothing."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx
from tests.contract.loops import (
    FAST,
    STAGES,
    Net,
    close,
    compiled,
    config,
    data,
    net,
    refused,
    same,
    sgd,
    sharded,
    train,
    twin,
)
from tests.ranks import run_ranks
from zerofx.errors import ShardingError


def _torch_modules(build: Any, stage: int) -> None:
    _alike(build, stage)


def _alike(build: Any, stage: int) -> tuple[Any, Any]:
    """Train both, then evaluate both without gradients."""
    model, ddp = net(build), twin(net(build))
    if build is _Recurrent:
        zerofx.shard(model, config(stage))
    run = compiled(model, stage)
    train(run, sgd(model))
    train(ddp, sgd(ddp))
    assert sharded(model)
    same(model, ddp)
    model.eval()
    ddp.eval()
    with torch.no_grad():
        close(run(*data(9)), ddp(*data(9)), "evaluation", 1e-5)
        if stage == 3:
            close(model(*data(9)), ddp(*data(9)), "evaluation in eager code", 1e-5)
    return model, ddp.module


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 5, num_layers=2, bidirectional=True, proj_size=3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.lstm(x[:, None])[0][:, 0, :5], y)


class _Attention(nn.Module):
    """Torch's own fast path reads weights directly in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 9, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.up(x)[None]
        x = self.layer(x + self.attention(x, x, x)[0])
        return F.mse_loss(x[0, :, :5], y)


class _Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(7, 7), torch.randn(7, 7)])
        self.named = nn.ParameterDict({"out": torch.randn(7, 5), "bias": torch.zeros(5)})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return F.mse_loss(x @ self.named["out"] + self.named["bias"], y)


class _Slots(nn.Linear):
    __slots__ = ("note",)


class _Registered(nn.Linear):
    """`__init_subclass__` wants an argument, and counts."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, tag: str) -> None:
        cls.known.append(tag)


class _Tagged(_Registered, tag="tagged"):
    @property
    def doubled(self) -> Tensor:
        return self.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.doubled, self.bias)


class _Getattr(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        return 3.0 if name == "three" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.three


class _Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slots, self.tagged, self.getattr = _Slots(7, 7), _Tagged(7, 7), _Getattr(7, 5)
        self.slots.note = "kept"
        self.own = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.getattr(self.tagged(self.slots(x)) * self.own), y)


@pytest.mark.parametrize("build", [_Attention, _Lists, _Recurrent])
@pytest.mark.parametrize("stage", [0, 3])
def test_modules_of_torch(build: Any, stage: int) -> None:
    run_ranks(2, _torch_modules, build, stage)


def _classes() -> None:
    for stage in (1, 3):
        model, plain = _alike(_Classes, stage)
        for (_, ours), (_, theirs) in zip(
            model.named_modules(), plain.named_modules(), strict=True
        ):
            assert isinstance(ours, type(theirs))
            for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
                assert getattr(type(ours), attribute) == getattr(type(theirs), attribute)
            assert repr(ours) == repr(theirs)
        assert model.slots.note == "kept" and _Tagged.known == ["tagged"]
        assert "__init_subclass__" not in vars(_Tagged)
        assert model.tagged.doubled.shape == (7, 7)

        class _Later(_Registered, tag="later"):
            pass

        assert _Tagged.known == ["tagged", "later"]
        _Tagged.known.remove("later")


def test_user_classes_keep_name_slots_properties_and_registries() -> None:
    run_ranks(2, _classes)


def _read_on_one_rank() -> None:
    for stage in STAGES:
        model = net()
        train(compiled(model, stage), sgd(model), 1)
        weight = model.first.weight
        assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
        assert weight.is_leaf and weight.shape == (13, 7)
        if torch.distributed.get_rank() == 0:
            print(weight.shape, weight, model)
            assert hasattr(model.first, "weight") and repr(model) == repr(Net())
            assert dict(inspect.getmembers(model.first))["weight"] is weight
            assert model.get_parameter("first.weight") is weight
            assert model.first.weight is weight and getattr(model.first, "bias", None) is not None
            assert weight.numel() == 91 and weight.dtype == torch.float32
            assert model.first.weight.grad is None
            model.state_dict()
        model(*data(0)).backward()
        assert model.first.weight.grad is not None and model.first.weight is weight


def test_reading_on_one_rank_communicates_nothing() -> None:
    run_ranks(2, _read_on_one_rank)


def _toggled(stage: int) -> None:
    model, ddp_model = net(), net()
    run = compiled(model, stage)
    optimizer = sgd(model)
    train(run, optimizer, 1)
    wanted = sgd(ddp_model)
    ddp = twin(ddp_model)
    wanted = sgd(ddp)
    train(ddp, wanted, 1)
    for flags in ((False, True), (True, False), (True, True)):
        for one in (model, ddp.module):
            one.first.weight.requires_grad_(flags[0])
            one.last.requires_grad_(flags[1])
        again = nn.parallel.DistributedDataParallel(ddp.module)  # it looks at them once
        train(run, optimizer, [3, 4])
        train(again, wanted, [3, 4])
        same(model, ddp)


@pytest.mark.parametrize("stage", [0, 3])
def test_requires_grad_toggled(stage: int) -> None:
    run_ranks(2, _toggled, stage)


def _converted(stage: int) -> None:
    model, ddp = net(), twin(net())
    run = compiled(model, stage)
    train(run, sgd(model), 1)
    train(ddp, sgd(ddp), 1)
    ddp = twin(ddp.module.double())
    optimizer = sgd(model)
    model.double()
    assert model.first.weight.dtype == torch.float64 and sharded(model)
    doubled = [tuple(value.double() for value in data(number)) for number in (1, 2)]
    for one, by in ((run, optimizer), (ddp, sgd(ddp))):
        for inputs in doubled:
            one(*inputs).backward()
            by.step()
            by.zero_grad()
    same(model, ddp, rtol=1e-12)
    model.to(torch.bfloat16)
    model(*(value.bfloat16() for value in doubled[0])).backward()
    model.zero_grad()
    model.float()
    ddp = twin(ddp.module.to(torch.bfloat16).float())
    train(run, sgd(model), 1)
    train(ddp, sgd(ddp), 1)
    same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_conversion_to_other_dtypes(stage: int) -> None:
    run_ranks(2, _converted, stage)


class _Hidden(nn.Module):
    """A part of it is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.hidden = nn.Linear(4, 4), [nn.Linear(4, 1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.seen(x)).sum()


def _in_a_plain_list() -> None:
    run = torch.compile(_Hidden(), backend="zero3", options=FAST)
    with refused("plain list or dict", "nn.ModuleList", kind=ShardingError):
        run(torch.randn(2, 4))


def test_modules_in_a_plain_list() -> None:
    run_ranks(2, _in_a_plain_list)
