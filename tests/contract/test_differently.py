"""What docs/loops.md says to write where a `DTensor` is no plain tensor."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofx
from tests.contract.loops import (
    Net,
    close,
    compiled,
    config,
    data,
    full,
    net,
    same,
    sgd,
    train,
    twin,
)
from tests.logs import heard
from tests.ranks import run_ranks
from zerofx.runtime.pickles import say_once


def _average(stage: int) -> None:
    model, ddp = net(), twin(net())
    zerofx.shard(model, config(stage))
    for trained, run in ((model, compiled(model, stage)), (ddp.module, ddp)):
        average = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        own = {name: param.detach().clone() for name, param in trained.named_parameters()}
        optimizer = sgd(trained)
        for number in range(3):
            run(*data(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(trained)
            for name, param in trained.named_parameters():
                own[name].lerp_(param.detach(), 0.5)
        # Evaluate with the averages, as the usual class does: swapped in and out through `data`.
        before = {name: param.data.clone() for name, param in trained.named_parameters()}
        for name, param in trained.named_parameters():
            param.data = own[name]
        with torch.no_grad():
            trained.seen = run(*data(9)).detach()
        for name, param in trained.named_parameters():
            param.data = before[name]
        trained.average = average.module
    close(model.seen, ddp.module.seen, "with averages")
    pairs = zip(model.average.parameters(), ddp.module.average.parameters(), strict=True)
    for mine, plain in pairs:
        close(full(mine), plain.detach(), "average")


@pytest.mark.parametrize("stage", [0, 3])
def test_averages_made_before_the_first_forward(stage: int) -> None:
    run_ranks(2, _average, stage)


def _resume(stage: int, folder: str) -> None:
    model = net()
    zerofx.shard(model, config(stage))
    run, optimizer = compiled(model, stage), sgd(model)
    run(*data(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    file = Path(folder, f"rank{dist.get_rank()}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    rows = sum(value.to_local().nbytes for value in model.state_dict().values())
    assert file.stat().st_size < 2 * rows + 12_000, "resident values were saved as well"
    again = net(seed=1)
    zerofx.shard(again, config(stage))
    resumed, saved = sgd(again), torch.load(file, weights_only=False)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(copy.deepcopy(saved["optimizer"]))
    for trained, call, stepped in (
        (model, run, optimizer),
        (again, compiled(again, stage), resumed),
    ):
        call(*data(1)).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        stepped.step()
    for mine, other in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(mine), full(other))


@pytest.mark.parametrize("stage", [1, 3])
def test_shards_that_each_rank_saved(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _resume, stage, str(tmp_path))


def _one_rank_alone(stage: int, folder: str) -> list[str]:
    """Rank 0 saves, as with DDP, first its rows and then the whole."""
    model = net()
    compiled(model, stage)(*data(0)).backward()
    say_once.cache_clear()
    rows, whole = Path(folder, f"rows{stage}"), Path(folder, f"whole{stage}")
    with heard("zerofx.runtime.pickles") as said:
        for _ in range(2):
            if dist.get_rank() == 0:
                torch.save(model.state_dict(), rows)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    values = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(values, whole)
    dist.barrier()
    before = full(model.first.weight)
    if dist.get_rank() == 0:
        model.load_state_dict(torch.load(rows))
    else:
        with pytest.raises(RuntimeError, match=r"first\.weight[^\n]* another rank"):
            model.load_state_dict(torch.load(rows))
    assert torch.equal(full(model.first.weight), before)
    set_model_state_dict(model, torch.load(whole), options=StateDictOptions(full_state_dict=True))
    assert torch.equal(full(model.first.weight), before)
    model.again, plain = model.first, net(seed=1)
    plain.again = plain.first
    found = zerofx.checkpoint.full_state_dict(model, plain.state_dict())
    if dist.get_rank() == 0:
        plain.load_state_dict(found)
        assert torch.equal(plain.again.weight, found["first.weight"])
    return said


def test_one_rank_that_saves_alone(tmp_path: Path) -> None:
    first, other = run_ranks(2, _one_rank_alone, 3, str(tmp_path))
    assert len(first) == 1 and "every rank must write a file" in first[0] and not other


class _Together(Net):
    """A loss of all ranks' features, by collectives in `forward`: of CLIP, or of Barlow Twins."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.last(torch.tanh(self.first(x)))
        if not self.gathers:
            local = features.t() @ features
            whole = local.detach().clone()
            dist.all_reduce(whole)
            return (local + (whole - local).detach() - torch.eye(5)).square().mean()
        parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.detach())
        parts[dist.get_rank()] = features
        return (features @ torch.cat(parts).t()).square().mean()


def _collectives(gathers: bool) -> None:
    model, ddp = net(lambda: _Together(gathers)), twin(net(lambda: _Together(gathers)))
    ours, theirs = sgd(model), sgd(ddp)
    train(compiled(model, 3), ours)
    train(ddp, theirs)
    same(model, ddp)


@pytest.mark.parametrize("gathers", [True, False])
def test_collectives_in_forward(gathers: bool) -> None:
    run_ranks(2, _collectives, gathers)


def _late_hooks(stage: int) -> None:
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        model, ddp = net(), twin(net())
        run = compiled(model, stage)
        for number in range(4):
            hooks = [
                each.first.register_forward_hook(lambda _, args, out: 2 * out)
                for each in (model, ddp.module)
                if number == 2
            ]
            train(run, sgd(model), [number])
            train(ddp, sgd(ddp), [number])
            for hook in hooks:
                hook.remove()
        same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_from_after_the_first_forward(stage: int) -> None:
    run_ranks(2, _late_hooks, stage)
