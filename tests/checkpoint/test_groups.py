"""Groups of parameters are loaded as they were saved, or refused by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import zerofx
from tests.checkpoint.runs import Run, bitwise, sharded_by
from tests.contract.loops import refused
from tests.models import Mlp
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import CheckpointError

W0, B0, W1, B1 = (f"layers.{number}.{kind}" for number in (0, 2) for kind in ("weight", "bias"))
MATRICES, VECTORS = [W0, W1], [B0, B1]


def _grouped(model: nn.Module, *names: Sequence[str]) -> AdamW:
    """A learning rate of its own for each group."""
    params = dict(model.named_parameters())
    groups: list[Any] = [
        {"params": [params[name] for name in each], "lr": 0.1 / number}
        for number, each in enumerate(names, 1)
    ]
    return AdamW(groups)


def _rates(model: nn.Module, *optimizers: Optimizer) -> dict[str, float]:
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [group for each in optimizers for group in each.param_groups]
    return {names[id(param)]: group["lr"] for group in groups for param in group["params"]}


def _moved(folder: Path) -> None:
    run = Run(3, build=Mlp)
    run.optimizers = [_grouped(run.model, MATRICES, VECTORS)]
    run.train([0])
    checkpoint.save(folder, run.model, run.optimizers)
    rates = _rates(run.model, *run.optimizers)
    for names in ((MATRICES, VECTORS), (VECTORS, MATRICES), (MATRICES[::-1], VECTORS)):
        optimizer = _grouped(run.model, *names)
        checkpoint.load(folder, run.model, optimizer)
        assert _rates(run.model, optimizer) == rates and len(optimizer.state) == 4
    added = _grouped(run.model, VECTORS)
    added.add_param_group({"params": _grouped(run.model, MATRICES).param_groups[0]["params"]})
    checkpoint.load(folder, run.model, added)
    assert _rates(run.model, added) == rates
    run.train([1])
    before = Run.values(run.model)
    cases = {
        f"{W1}: group 0 in the checkpoint, 1 here": [[W0], [W1, B0, B1]],
        f"{B0}: group 1 in the checkpoint, 0 here": [[W0, B0], [W1, B1]],
        "param_groups.2.params is not in the checkpoint": [[W0, W1], [B0], [B1]],
    }
    for said, names in cases.items():
        optimizer = _grouped(run.model, *names)
        settings = [dict(group) for group in optimizer.param_groups]
        with refused(said, kind=CheckpointError):
            checkpoint.load(folder, run.model, optimizer)
        assert optimizer.param_groups == settings and not optimizer.state
    bitwise(Run.values(run.model), before)


def test_parameters_in_other_groups_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _moved, tmp_path)


def test_several_optimizers_in_another_order_are_refused(tmp_path: Path) -> None:
    model = Mlp()
    pair = [_grouped(model, MATRICES), _grouped(model, VECTORS)]
    checkpoint.save(tmp_path, model, pair)
    with pytest.raises(CheckpointError, match=f"{B0}: group 1 in the checkpoint, 0 here"):
        checkpoint.load(tmp_path, model, pair[::-1])


def test_parameters_that_either_lacks_are_no_matter(tmp_path: Path) -> None:
    model = Mlp()
    checkpoint.save(tmp_path, model, _grouped(model, [W0, W1, B1], [B0]))
    optimizer = _grouped(model, [W0], [B0, B1])
    with pytest.raises(CheckpointError, match=f"{B1}: group 0 in the checkpoint, 1 here"):
        checkpoint.load(tmp_path, model, optimizer)
    fewer = _grouped(model, [B0], [W0, W1])
    checkpoint.load(tmp_path, model, fewer)
    assert _rates(model, fewer) == {B0: 0.05, W0: 0.1, W1: 0.1}
    with pytest.raises(CheckpointError, match=f"{B1}: group none in the checkpoint, 1 here"):
        checkpoint.save(tmp_path, model, _grouped(model, [W0, W1], [B0]))
        checkpoint.load(tmp_path, model, _grouped(model, [W0, W1, B0], [B1]))


def _rate_is_a_tensor(folder: Path) -> None:
    run = Run(3, build=Mlp)
    params = list(run.model.parameters())
    saved = AdamW(params, lr=torch.tensor(0.01), foreach=False)
    run.optimizers, schedule = [saved], StepLR(saved, 1, 0.5)
    run.train([0])
    schedule.step()
    checkpoint.save(folder / "tensor", run.model, saved)
    checkpoint.save(folder / "number", run.model, AdamW(params, lr=0.5, foreach=False))
    for rate in (torch.tensor(0.7), 0.7):
        again = AdamW(params, lr=rate, foreach=False)
        checkpoint.load(folder / "tensor", run.model, again)
        group = again.param_groups[0]
        assert torch.equal(group["lr"], torch.tensor(0.005))
        assert torch.equal(group["initial_lr"], torch.tensor(0.01))
        checkpoint.load(folder / "number", run.model, again)
        assert again.param_groups[0]["lr"] == 0.5


def test_a_learning_rate_may_be_a_tensor(tmp_path: Path) -> None:
    run_ranks(2, _rate_is_a_tensor, tmp_path)


def _lacking(folder: Path) -> None:
    """A schedule that is built before loading writes settings that no schedule did then."""
    model = zerofx.shard(Mlp(), sharded_by(3))
    checkpoint.save(folder, model, _grouped(model, MATRICES, VECTORS))
    optimizer = _grouped(model, VECTORS, MATRICES)
    schedule = StepLR(optimizer, 1, 0.5)
    optimizer.param_groups[1]["mine"] = "matrices"
    checkpoint.load(folder, model, optimizer)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.05]
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
    assert [group.get("mine") for group in optimizer.param_groups] == [None, "matrices"]
    optimizer.step()
    schedule.step()


def test_settings_that_the_checkpoint_lacks_stay(tmp_path: Path) -> None:
    run_ranks(2, _lacking, tmp_path)


def test_what_no_damage_explains_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mlp()
    checkpoint.save(tmp_path, model, SGD(model.parameters(), lr=0.1))

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("this planner takes no such thing")

    monkeypatch.setattr("torch.distributed.checkpoint.DefaultLoadPlanner.load_bytes", fail)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load(tmp_path, model, SGD(model.parameters(), lr=0.1))
    assert "takes no such thing" in str(raised.value)
    assert "older checkpoint" not in str(raised.value)
