"""A run that is saved and loaded goes on bit by bit as if it had never stopped."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW

import zerofx
from tests.checkpoint.runs import OPTIONS, Everything, Run, bitwise, sharded_by
from tests.models import Mlp, batch, make
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import CheckpointError
from zerofx.runtime.members import gloo_group

STAGES = (0, 1, 2, 3)


def pairs(folder: Path) -> None:
    runs = {stage: Run(stage, reset=stage == 0) for stage in STAGES}
    wanted: dict[int, tuple[Any, ...]] = {}
    for saved, run in runs.items():
        run.train(range(3))
        checkpoint.save(folder / str(saved), run.step, run.optimizer, {"step": 3})
        wanted[saved] = run.state(), run.train(range(3, 6)), run.state()
    # Loaded after the first forward at odd stages, and before it at even ones.
    for stage, saved in itertools.product((1, 3, 0, 2), STAGES):
        again = runs[stage] if stage % 2 else Run(stage, seed=1)
        assert checkpoint.load(folder / str(saved), again.step, again.optimizer) == {"step": 3}
        bitwise(again.state(), wanted[saved][0])
        assert again.train(range(3, 6)) == wanted[saved][1], (saved, stage)
        bitwise(again.state(), wanted[saved][2])


def test_every_stage_loads_every_other(tmp_path: Path) -> None:
    """An odd stage loads into a run that has trained further, which nothing may be left of."""
    run_ranks(2, pairs, tmp_path, timeout=220)


def _write(folder: Path, stage: int) -> dict[str, torch.Tensor]:
    run = Run(stage)
    run.train(range(2))
    checkpoint.save(folder, run.model, run.optimizer)
    return run.state()


def _read(folder: Path, stage: int, shard_first: bool) -> dict[str, torch.Tensor]:
    run = Run(stage, seed=1)
    if shard_first:
        zerofx.shard(run.model, sharded_by(stage))
    checkpoint.load(folder, run.model, run.optimizer)
    state = run.state()
    run.train([3])
    return state


@pytest.mark.parametrize(
    ("before", "after", "stage", "shard_first"),
    [(2, 1, 1, True), (1, 2, 3, True), (4, 2, 3, False), (2, 4, 1, False)],
)
def test_another_number_of_ranks(
    tmp_path: Path, before: int, after: int, stage: int, shard_first: bool
) -> None:
    wanted = run_ranks(before, _write, tmp_path, stage, timeout=120)[0]
    for got in run_ranks(after, _read, tmp_path, 4 - stage, shard_first, timeout=120):
        bitwise(got, wanted)


def _hybrid(folder: Path) -> dict[str, torch.Tensor]:
    """Two replicas of two shards each; initialised without memory."""
    torch.manual_seed(0)
    with zerofx.meta_init():
        model = Everything()
    options: dict[str, Any] = {"replicate": 2}
    zerofx.shard(model, sharded_by(3, **options))
    run = Run(3, build=lambda: model, **options)
    wanted = {name: value.clone() for name, value in run.state().items()}
    run.train(range(2))
    checkpoint.save(folder, run.model, run.optimizer)
    checkpoint.export_safetensors(run.model, folder / "weights")
    other = Everything()
    zerofx.load_safetensors(other, folder / "weights", sharded_by(3, **options))
    bitwise(Run.values(other), Run.values(run.model))
    torch.manual_seed(0)
    bitwise(wanted, Run.values(Everything()))
    return run.state()


def test_hybrid_sharding(tmp_path: Path) -> None:
    wanted = run_ranks(4, _hybrid, tmp_path / "a", timeout=120)[0]
    for got in run_ranks(2, _read, tmp_path / "a", 3, True, timeout=120):
        bitwise(got, wanted)


def _asynchronous(folder: Path, stage: int) -> None:
    run = Run(stage)
    run.train(range(2))
    saving = checkpoint.async_save(folder / "a", run.step, run.optimizer, "notes")
    at_save = run.state()
    losses = run.train(range(2, 5))  # edits the very memory that is being saved
    saving.wait()
    assert saving.done()
    again = Run(stage, seed=1)
    assert checkpoint.load(folder / "a", again.model, again.optimizer) == "notes"
    bitwise(again.state(), at_save)
    assert again.train(range(2, 5)) == losses


def _again_and_again(folder: Path) -> int:
    """How many groups saves in threads make."""
    run = Run(3)
    run.train(range(1))
    with patch("zerofx.checkpoint.ranks.gloo_group", wraps=gloo_group) as made:
        for number in range(3):
            checkpoint.async_save(folder / str(number), run.step, run.optimizer).wait()
        first, second = (
            checkpoint.async_save(folder / name, run.step, run.optimizer) for name in "ab"
        )
        first.wait(), second.wait()
    return made.call_count


def test_saves_one_after_another_share_a_group(tmp_path: Path) -> None:
    assert max(run_ranks(2, _again_and_again, tmp_path, timeout=120)) in (1, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_during_an_async_save(tmp_path: Path, stage: int) -> None:
    run_ranks(2, _asynchronous, tmp_path, stage, timeout=120)


class _Single:
    def __reduce__(self) -> str:
        raise ValueError("there is one of me")


def _not_copied(folder: Path) -> None:
    run = Run(3)
    run.train(range(1))
    with pytest.raises(CheckpointError, match="there is one of me"):
        checkpoint.async_save(folder / "a", run.step, run.optimizer, _Single())
    checkpoint.async_save(folder / "a", run.step, run.optimizer, "notes").wait()


def test_an_extra_that_cannot_be_copied(tmp_path: Path) -> None:
    run_ranks(2, _not_copied, tmp_path)


def _untouched(folder: Path) -> None:
    """Saving before the first step leaves no trace, neither in the run nor in the file."""
    plain = Run(3)
    wanted = plain.train(range(3))
    for when in ("plain", "sharded"):
        run = Run(3)
        if when == "sharded":
            zerofx.shard(run.model, sharded_by(3))
        checkpoint.save(folder / when, run.model, run.optimizer)
        assert not run.optimizer.state
        assert run.train(range(3)) == wanted, when
        again = Run(3, seed=1)
        again.train([5])
        checkpoint.load(folder / when, again.model, again.optimizer)
        assert again.train(range(3)) == wanted, when
        bitwise(again.state(), plain.state())


def test_a_save_before_the_first_step(tmp_path: Path) -> None:
    run_ranks(2, _untouched, tmp_path, timeout=120)


def _gradients(folder: Path) -> None:
    run = Run(2)
    run.train(range(2))
    checkpoint.save(folder, run.model, run.optimizer)
    run.step(*batch("mlp", dist.get_rank(), 2)).backward()
    held = {name: param.grad for name, param in run.model.named_parameters()}
    checkpoint.load(folder, run.model, run.optimizer)
    assert all(param.grad is held[name] for name, param in run.model.named_parameters())


def test_gradients_survive_a_load(tmp_path: Path) -> None:
    run_ranks(2, _gradients, tmp_path)


class _Nested(nn.Module):
    """A part is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = torch.compile(Mlp(), backend="zero3", options=OPTIONS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.inner(x, y)


def _names(folder: Path) -> None:
    run = Run(3, build=_Nested)
    run.train([0])
    checkpoint.save(folder, run.step, run.optimizer)
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert "model.inner.layers.0.weight" in names
    assert "optimizer.state.inner.layers.0.weight.exp_avg" in names
    assert not [name for name in names if "_orig_mod" in name]
    plain = Mlp()
    optimizer = AdamW(plain.parameters())
    state = {"model": {f"inner.{name}": value for name, value in plain.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder)
    for name, value in run.state().items():
        if name in state["model"]:
            assert torch.equal(state["model"][name], value), name
    del optimizer


def test_names_are_those_of_the_plain_model(tmp_path: Path) -> None:
    run_ranks(2, _names, tmp_path)


def _from_fsdp(folder: Path) -> None:
    rank = dist.get_rank()
    model = make("mlp")
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def steps(run: Any, by: Any, numbers: range) -> list[float]:
        losses: list[float] = []
        for number in numbers:
            loss = run(*batch("mlp", rank, number))
            loss.backward()
            losses.append(loss.item())
            by.step()
            by.zero_grad()
        return losses

    steps(model, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    wanted = steps(model, optimizer, range(3, 6))
    run = Run(3, seed=1, build=Mlp, min_shard_numel=0)
    assert checkpoint.load(folder, run.model, run.optimizer) is None
    assert run.train(range(3, 6)) == wanted
    for name, param in model.named_parameters():
        assert torch.equal(run.state()[name], param.full_tensor()), name  # pyright: ignore


def test_a_checkpoint_of_fsdp_goes_on_in_zero3(tmp_path: Path) -> None:
    run_ranks(2, _from_fsdp, tmp_path)


def _plain_dcp(folder: Path) -> None:
    """torch's functions alone, without a word of zerofx."""
    run = Run(3, build=Mlp)
    run.train(range(2))
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    wanted = run.state()
    losses = run.train(range(2, 4))
    run = Run(1, seed=1, build=Mlp)
    run.train([9])
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        run.model, run.optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    bitwise(run.state(), wanted)
    assert run.train(range(2, 4)) == losses


def test_torch_alone_saves_and_loads(tmp_path: Path) -> None:
    run_ranks(2, _plain_dcp, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # in torch's thread
def test_one_process_without_a_group(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Everything()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(*batch("mlp", 0, 0)).backward()
    optimizer.step()
    checkpoint.save(tmp_path / "one", model, optimizer)
    checkpoint.async_save(tmp_path / "two", model).wait()
    other = Everything()
    for name in ("one", "two"):
        checkpoint.load(tmp_path / name, other)
        bitwise(other.state_dict(), model.state_dict())
