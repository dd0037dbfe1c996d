"""Point 3: copies of a model, taken before and after it is sharded."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofx
from tests.contract.loops import (
    STAGES,
    Net,
    close,
    compiled,
    config,
    data,
    full,
    net,
    refused,
    same,
    sgd,
    sharded,
    still_plain,
    train,
    twin,
)
from tests.ranks import run_ranks


def _before(stage: int) -> None:
    model, ddp = net(), twin(net())
    ema, want = copy.deepcopy(model), copy.deepcopy(model)
    run = compiled(model, stage)
    train(run, sgd(model))
    train(ddp, sgd(ddp))
    same(model, ddp)
    still_plain(ema)
    same(ema, want)
    with torch.no_grad():
        for one, other in zip(ema.parameters(), model.parameters(), strict=True):
            one.lerp_(full(other), 0.5)
    ema(*data(0))


def test_a_copy_from_before_stays_plain() -> None:
    for stage in (1, 3):
        run_ranks(2, _before, stage)


class _Tied(nn.Module):
    """A root with its own parameter, tied weights, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.up, self.down = nn.Linear(7, 7), nn.Linear(7, 7)
        self.down.weight = self.up.weight
        self.norm = nn.BatchNorm1d(7)
        self.lstm = nn.LSTM(7, 7)  # caches its weights

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.lstm(x)[0]
        x = self.norm(self.down(torch.tanh(self.up(x))))
        return F.mse_loss(x[:, :5] * self.scale, y)


def _after(stage: int) -> None:
    model, ddp = net(_Tied).double(), twin(net(_Tied).double())  # its norm magnifies rounding
    step = functools.partial(train, dtype=torch.float64)
    zerofx.shard(model, config(stage))
    run = compiled(model, stage)
    step(run, sgd(model), 1)
    step(ddp, sgd(ddp), 1)
    if torch.distributed.get_rank() == 0:
        copy.deepcopy(model)  # communicates nothing
    clone, ddp_clone = copy.deepcopy(model), twin(ddp.module)
    assert clone.down.weight is clone.up.weight is not model.up.weight
    same(clone, ddp)
    step(compiled(clone, stage), sgd(clone), [5, 6])
    same(model, ddp)  # the copy is independent
    step(ddp_clone, sgd(ddp_clone), [5, 6])
    assert sharded(clone)
    for name, param in ddp_clone.module.named_parameters():
        close(full(clone.get_parameter(name)), param.detach(), name)
    # The LSTM makes Dynamo skip the frame: buffers are rank 0's in eager code, too.
    close(clone.norm.running_mean, ddp_clone.module.norm.running_mean, "running_mean")
    step(compiled(model, stage), sgd(model), [7])
    clone.eval()
    with torch.no_grad():
        batch = data(3, dtype=torch.float64)
        close(clone(*batch), ddp_clone.eval()(*batch), "the copy in eager code")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_copy_of_a_sharded_model_is_an_independent_one(stage: int) -> None:
    run_ranks(2, _after, stage)


def _twice(stage: int) -> None:
    model = net()
    run = compiled(model, stage)
    train(run, sgd(model), 1)
    clone = copy.deepcopy(model)
    other = compiled(clone, stage)
    for each in (run, other):
        (each(*data(0)) + each(*data(1))).backward()
    for param, copied in zip(model.parameters(), clone.parameters(), strict=True):
        close(full(copied.grad), full(param.grad), "gradient")


def test_a_copy_runs_twice_before_its_first_backward() -> None:
    for stage in STAGES:
        run_ranks(2, _twice, stage)


def _parts(stage: int) -> None:
    """What loops copy without the model: the best weights so far, gradients, an optimizer."""
    model = net()
    run, optimizer = compiled(model, stage), sgd(model)
    train(run, optimizer, 1)
    run(*data(1)).backward()
    weight: Any = model.first.weight
    grads = [full(param.grad).clone() for param in model.parameters()]
    before = {name: full(value).clone() for name, value in model.state_dict().items()}
    best, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    copied: Any = copy.deepcopy([param.grad for param in model.parameters()])
    param: Any = copy.deepcopy(weight)
    twice: Any = copy.deepcopy([weight, weight])
    other: Any = copy.deepcopy(optimizer)
    assert twice[0] is twice[1] is not weight
    assert isinstance(param, nn.Parameter) and param.requires_grad
    whole, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (param, *whole.parameters(), *again.parameters()):
        assert each.grad is None, "torch copies parameters without their gradients"
    train(run, optimizer, [2])
    for got, want in zip(copied, grads, strict=True):
        close(full(got), want, "copied gradient")
    param.data[-1].zero_()  # rows can be written to, as the original's
    assert not full(param)[-1].any()
    close(full(param)[:-1], before["first.weight"][:-1], "copied parameter")
    model.load_state_dict(best)
    for name, value in model.state_dict().items():
        close(full(value), before[name], name)
    pairs = zip(other.param_groups[0]["params"], model.parameters(), copied, strict=True)
    for one, stepped, grad in pairs:
        one.grad, stepped.grad = copy.deepcopy(grad), grad
    optimizer.load_state_dict(saved)
    optimizer.step()
    other.step()
    for one, stepped in zip(other.param_groups[0]["params"], model.parameters(), strict=True):
        close(full(one), full(stepped), "what a copied optimizer stepped over")


@pytest.mark.parametrize("stage", [0, 3])
def test_copies_of_parts(stage: int) -> None:
    run_ranks(2, _parts, stage)


class _Listed(Net):
    """Keeps a list of parameters: those whose weights decay, say."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = [self.first.weight]


def _together(stage: int) -> None:
    """A trainer is copied, or pickled: its optimizer steps over the parameters of its model."""
    model = net(_Listed)
    run, optimizer = compiled(model, stage), sgd(model)
    train(run, optimizer, 1)
    whole = model, optimizer
    copies = [
        copy.deepcopy(whole),
        copy.deepcopy(whole[::-1])[::-1],
        pickle.loads(pickle.dumps(whole)),
        pickle.loads(pickle.dumps(whole[::-1]))[::-1],
    ]
    train(run, optimizer, [1, 2])
    for clone, its in copies:
        held = {id(param) for group in its.param_groups for param in group["params"]}
        assert held == {*map(id, clone.parameters())} == {*map(id, its.state)}
        assert clone.decayed[0] is clone.first.weight is not model.first.weight
        assert sharded(clone)
        train(compiled(clone, stage), its, [1, 2])
        same(clone, model)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_is_copied_with_its_model(stage: int) -> None:
    run_ranks(2, _together, stage)


def _averaged(stage: int) -> None:
    model, ddp = net(), twin(net())
    early = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    want = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run, optimizer, wanted = compiled(model, stage), sgd(model), sgd(ddp)
    train(run, optimizer, 1)
    train(ddp, wanted, 1)
    still_plain(early)
    late = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    want = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in (1, 2):
        train(run, optimizer, [number])
        train(ddp, wanted, [number])
        late.update_parameters(model)
        want.update_parameters(ddp.module)
        with torch.no_grad():  # a resident copy of the average must not be stale
            close(late(*data(4)), want(*data(4)), f"average after step {number}")
    same(late, want)


def test_averaged_models() -> None:
    for stage in STAGES:
        run_ranks(2, _averaged, stage)


def _saved(stage: int) -> bytes:
    model = net()
    run = compiled(model, stage)
    train(run, sgd(model), 1)
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(loaded.first).__name__ == "Linear" and sharded(loaded)
    same(loaded, model)
    train(compiled(loaded, stage), sgd(loaded), [3])
    train(run, sgd(model), [3])
    same(loaded, model)
    return file.getvalue()


def _load_elsewhere(data: bytes) -> None:
    with refused("first.weight", "as many ranks"):
        torch.load(io.BytesIO(data), weights_only=False)


def _load_the_other_ranks(files: list[bytes]) -> None:
    with refused("is part", "unpickle what this rank pickled"):
        torch.load(io.BytesIO(files[1 - torch.distributed.get_rank()]), weights_only=False)


def test_a_pickled_model() -> None:
    for stage in STAGES:
        files = run_ranks(2, _saved, stage)
    run_ranks(1, _load_elsewhere, files[0])
    run_ranks(2, _load_the_other_ranks, files)


def _state_dict_names() -> list[str]:
    model = net()
    train(compiled(model, 3), sgd(model), 1)
    assert list(model.state_dict()) == list(Net().state_dict())
    zerofx.shard(net(), config(3))
    return list(model.state_dict())


def test_state_dicts_of_the_plain_model_have_plain_names() -> None:
    names = run_ranks(2, _state_dict_names)[0]
    assert not any("_orig_mod" in name for name in names)


def _averaged_buffers(stage: int) -> None:
    """Parameters are `DTensor`s and buffers are not; one call of torch averages both."""
    how: Any = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}
    plain, model = (torch.nn.Sequential(net(), torch.nn.BatchNorm1d(5)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    zerofx.shard(model, zerofx.ZeroConfig(stage=stage, inner="eager", min_shard_numel=0))
    averages = [AveragedModel(each, **how) for each in (model, plain)]
    for average, each in zip(averages, (model, plain), strict=True):
        for _ in range(2):
            average.update_parameters(each)
            with torch.no_grad():
                for value in (*each.parameters(), *each.buffers()):
                    value.add_(1)
    same(*averages)


@pytest.mark.parametrize("stage", [0, 3])
def test_averages_of_buffers_too(stage: int) -> None:
    run_ranks(2, _averaged_buffers, stage)
