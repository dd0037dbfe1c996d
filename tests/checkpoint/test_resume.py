"""A run that is saved and loaded goes on bit by bit as if it had never stopped."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

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

STAGES = (0, 1, 2, 3)


def pairs(folder: Path) -> None:
    runs, wanted = dict[int, Run](), dict[int, tuple[Any, ...]]()

    def loaded(run: Run, saved: int) -> None:
        assert checkpoint.load(folder / str(saved), run.step, run.optimizer) == {"step": saved}
        bitwise(run.state(), wanted[saved][0])

    def goes_on(run: Run, saved: int) -> None:
        loaded(run, saved)
        assert run.train(range(3, 6)) == wanted[saved][1], saved
        bitwise(run.state(), wanted[saved][2])

    for stage in reversed(STAGES):
        run = runs[stage] = Run(stage, seed=stage, reset=not runs)
        if wanted:  # it begins with what that before it saved, loaded before the first forward
            goes_on(run, stage + 1)
        run.train(range(3))
        checkpoint.save(folder / str(stage), run.step, run.optimizer, {"step": stage})
        wanted[stage] = run.state(), run.train(range(3, 6)), run.state()
    for stage, saved in itertools.product(STAGES, STAGES):
        goes_on(runs[stage], saved)
    for saved in STAGES:
        fresh = Run(3 - saved, seed=1, reset=False)
        loaded(fresh, saved)
        whole = fresh.model.state_dict()  # of this rank, too
        bitwise(whole, {name: wanted[saved][0][name] for name in whole})


def test_every_stage_loads_every_other(tmp_path: Path) -> None:
    """Each loads into a run that has trained further, which nothing may be left of."""
    run_ranks(2, pairs, tmp_path, timeout=220)


State = dict[str, torch.Tensor]


def _write(folder: Path, stage: int) -> State:
    """What a step leaves, without a program."""
    run = Run(stage)
    zerofx.shard(run.model, sharded_by(stage))
    run.only_update()
    checkpoint.save(folder, run.model, run.optimizer)
    return run.state()


def _read(
    folder: Path, stage: int, shard_first: bool, then: Path | None = None
) -> tuple[State, State]:
    """What was read; what training on left, if it is to be saved."""
    run = Run(stage, seed=1)
    if shard_first:
        zerofx.shard(run.model, sharded_by(stage))
    checkpoint.load(folder, run.model, run.optimizer)
    state = run.state()
    if then is not None:
        run.train([3])
        checkpoint.save(then, run.model, run.optimizer)
    return state, run.state()


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """Each number of ranks but the last ones trains on, and saves for the next."""
    by4, by2, by1 = (tmp_path / name for name in ("by4", "by2", "by1"))
    wanted = {by4: run_ranks(4, _write, by4, 3, timeout=120)[0]}
    for ranks, read, stage, shard_first, then in (
        (2, by4, 1, False, by2),
        (4, by2, 3, False, None),
        (1, by2, 3, True, by1),
        (2, by1, 1, True, None),
    ):
        for got, left in run_ranks(ranks, _read, read, stage, shard_first, then, timeout=120):
            bitwise(got, wanted[read])
            if then is not None:
                wanted[then] = left


def _hybrid(folder: Path) -> dict[str, torch.Tensor]:
    """Two replicas of two shards each; initialised without memory."""
    torch.manual_seed(0)
    with zerofx.meta_init():
        model = Everything()
    options: dict[str, Any] = {"replicate": 2}
    zerofx.shard(model, sharded_by(3, **options))
    run = Run(3, build=lambda: model, **options)
    wanted = {name: value.clone() for name, value in run.state().items()}
    run.only_update()
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
    for got, _ in run_ranks(2, _read, tmp_path / "a", 3, True, tmp_path / "b", timeout=120):
        bitwise(got, wanted)


def _asynchronous(folder: Path) -> None:
    first, second = (Run(stage, seed=stage, reset=stage == 1) for stage in (1, 3))
    first.train(range(2))
    # First into a run before its first forward, then into one that has trained.
    for run, again in ((first, second), (second, first)):
        saving = checkpoint.async_save(folder / "a", run.step, run.optimizer, "notes")
        at_save = run.state()
        losses = run.train(range(2, 5))  # edits the very memory that is being saved
        saving.wait()
        assert saving.done()
        assert checkpoint.load(folder / "a", again.model, again.optimizer) == "notes"
        bitwise(again.state(), at_save)
        assert again.train(range(2, 5)) == losses


def test_training_goes_on_during_an_async_save(tmp_path: Path) -> None:
    run_ranks(2, _asynchronous, tmp_path, timeout=120)


def _untouched(folder: Path) -> None:
    """Saving before the first step leaves no trace, neither in the run nor in the file."""
    plain = Run(3)
    wanted, state = plain.train(range(3)), plain.state()
    for when in ("plain", "sharded"):
        run = Run(3, reset=False)
        if when == "sharded":
            zerofx.shard(run.model, sharded_by(3))
        checkpoint.save(folder / when, run.model, run.optimizer)
        assert not run.optimizer.state
        assert run.train(range(3)) == wanted, when
        bitwise(run.state(), state)
        plain.train([5])
        checkpoint.load(folder / when, plain.model, plain.optimizer)
        assert plain.train(range(3)) == wanted, when
        bitwise(plain.state(), state)


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
