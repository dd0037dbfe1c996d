"""Checkpoints of others: read without their code, converted a tensor at a time, trained on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW

import zerofx
from tests.checkpoint.deepspeed_run import STEPS, Net, batch, groups_of, loss_of
from tests.hard.pair import full
from tests.ranks import run_ranks
from zerofx import ZeroConfig, checkpoint
from zerofx.checkpoint import open_source, to_dcp, to_safetensors
from zerofx.checkpoint.writer import alone
from zerofx.cli.main import main
from zerofx.errors import CheckpointError

RUNS = Path(__file__).parent / "deepspeed"
TOLERANCE = {1: 2e-2, 2: 1e-6, 3: 1e-6}  # the run at stage 1 computes in bf16


def _quiet(name: str) -> None:
    assert name


def _by_hand(steps: int) -> tuple[nn.Module, AdamW]:
    """What two ranks compute, in one process."""
    model = Net()
    optimizer = AdamW(groups_of(model), lr=1e-2)
    for step in range(steps):
        sum(loss_of(model(batch(rank, step))) / 2 for rank in range(2)).backward()  # pyright: ignore
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= tolerance * want.abs().max().clamp(min=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_values_are_those_of_the_run(stage: int) -> None:
    source = open_source(RUNS / f"zero{stage}")
    model, optimizer = _by_hand(STEPS)
    weights = source.tensors("model.")
    assert list(weights) == list(model.state_dict())
    for name, value in model.state_dict().items():
        _close(weights[name].read().float(), value, TOLERANCE[stage])
        assert weights[name].read().dtype == weights[name].like.dtype
    kept = source.tensors("optimizer.state.")
    for name, param in model.named_parameters():
        for kind, value in optimizer.state.get(param, {}).items():
            # Second moments of bf16 gradients are off by twice as much.
            _close(kept[f"{name}.{kind}"].read(), value, 3 * TOLERANCE[stage])
    assert len(kept) == 3 * len(optimizer.state)
    groups = source.state["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert groups[1]["params"] == ["body.bias", "norm.weight", "norm.bias"]
    assert source.state["extra"][0]["data_position"] == 12


def _go_on(folder: str, stage: int) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = Net()
    optimizer = AdamW(groups_of(model), lr=1.0)
    step: Any = torch.compile(
        model, backend=f"zero{stage}", options={"inner": "eager", "min_shard_numel": 0}
    )
    extra = checkpoint.load(folder, model, optimizer)
    assert extra["global_steps"] == STEPS and extra["data_position"] == 12
    for number in range(STEPS, 2 * STEPS):
        loss_of(step(batch(dist.get_rank(), number))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("wrote", "stage"), [(2, 3), (3, 1)])
def test_a_run_of_deepspeed_goes_on(tmp_path: Path, wrote: int, stage: int) -> None:
    to_dcp(open_source(RUNS / f"zero{wrote}"), tmp_path / "dcp", _quiet)
    want = _by_hand(2 * STEPS)[0].state_dict()
    for got in run_ranks(2, _go_on, str(tmp_path / "dcp"), stage, timeout=120):
        for name, value in want.items():
            _close(got[name], value, 1e-5)


def test_weights_for_hugging_face(tmp_path: Path) -> None:
    source, out = open_source(RUNS / "zero3"), tmp_path / "out"
    noted: list[str] = []
    to_safetensors(source, out, noted.append, dtype=torch.bfloat16, max_shard_bytes=100)
    places = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(places) == noted == list(source.tensors("model."))
    assert len(set(places.values())) > 1
    for name, file in places.items():
        want = source.tensors("model.")[name].read().bfloat16()
        assert torch.equal(load_file(out / file)[name], want)
    model = Net()
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "nothing")
    to_dcp(open_source(out), tmp_path / "back", _quiet)
    checkpoint.load(tmp_path / "back", model)
    want = source.tensors("model.")["embed.weight"].read()
    _close(model.embed.weight.detach(), want, 1e-2)


def test_names_without_a_prefix(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    with alone():
        dcp.save({"net": {"w": weight}, "step": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = open_source(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="names begin with net"):
        to_safetensors(source, tmp_path / "out", _quiet)
    to_safetensors(source, tmp_path / "out", _quiet, prefix="net.")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], weight)
    with pytest.raises(CheckpointError, match="already"):
        to_dcp(source, tmp_path / "again", _quiet)


def _copied(tmp_path: Path) -> Path:
    return shutil.copytree(RUNS / "zero2", tmp_path / "zero2") / "global_step3"


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    folder = _copied(tmp_path)
    last = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(last, 2000)
    with pytest.raises(CheckpointError, match=r"rank_1_mp_rank_00_optim_states\.pt cannot"):
        open_source(tmp_path / "zero2")
    last.unlink()
    with pytest.raises(CheckpointError, match="written by 2 ranks, and holds files of 1"):
        open_source(tmp_path / "zero2")
    weights = tmp_path / "bad.safetensors"
    save_file({"w": torch.zeros(9)}, weights)
    os.truncate(weights, weights.stat().st_size - 5)
    with pytest.raises(CheckpointError, match=r"bad.safetensors cannot be read"):
        open_source(weights)


class _Folder:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


class _Schedule:
    pass


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    file = _copied(tmp_path) / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    torch.save({**content, "lr_scheduler": _Schedule(), "epoch": 4}, file)
    extra = open_source(tmp_path / "zero2").state["extra"][0]
    assert extra["epoch"] == 4 and "lr_scheduler" not in extra, "nobody could use the object"
    torch.save({**content, "lr_scheduler": _Folder(str(tmp_path / "made"))}, file)
    with pytest.raises(CheckpointError, match=file.name):
        open_source(tmp_path / "zero2")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("latest", "said"),
    [(None, "without the file latest"), ("global_step9", "latest names 'global_step9'")],
)
def test_a_run_of_deepspeed_without_its_tag(tmp_path: Path, latest: str | None, said: str) -> None:
    tag = _copied(tmp_path)
    (tag.parent / "latest").unlink()
    if latest is not None:
        (tag.parent / "latest").write_text(latest)
    with pytest.raises(CheckpointError) as raised:
        open_source(tag.parent)
    assert said in str(raised.value) and f"- {tag.name}" in str(raised.value)
    assert open_source(tag).format == "deepspeed", "the remedy"
    shutil.rmtree(tag)
    with pytest.raises(CheckpointError, match=said if latest else "no safetensors"):
        open_source(tag.parent)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "dcp")
    assert main(["checkpoint", "convert", str(RUNS / "zero2"), target]) == 0
    printed = capsys.readouterr().out
    assert "optimizer       15" in printed and ", 1 file, " in printed
    assert main(["checkpoint", "inspect", target, "--json", "--tensors"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["format"] == "dcp" and data["parts"]["model"]["tensors"] == 9
    assert data["tensors"]["model.body.weight"] == {"shape": [6, 5], "dtype": "float32"}
    assert main(["checkpoint", "convert", str(RUNS / "zero2"), target]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["checkpoint", "inspect", f"{target}2"]) == 2
    assert "dcp2 does not exist" in capsys.readouterr().err
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    os.truncate(file, 10)
    assert main(["checkpoint", "inspect", target]) == 1
    assert f"  - {file.name}: " in capsys.readouterr().err


def test_rows_are_read_into_shards_afterwards(tmp_path: Path) -> None:
    to_safetensors(open_source(RUNS / "zero3"), tmp_path / "out", _quiet)
    want = open_source(RUNS / "zero3").tensors("model.")["body.weight"].read()
    for got in run_ranks(2, _load_rows, str(tmp_path / "out")):
        assert torch.equal(got, want)


def _load_rows(folder: str) -> Tensor:
    with zerofx.meta_init():
        model = Net()
    zerofx.load_safetensors(model, folder, ZeroConfig(stage=3, min_shard_numel=0))
    return model.body.weight.full_tensor()  # pyright: ignore
