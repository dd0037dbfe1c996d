"""`program.py` of a dump needs nothing of zerofx, and computes the same bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from tests.dumps.everything import SEED, batch, local, model, step
from tests.ranks import run_ranks
from tests.scripts import run_script
from zerofx.frontend import plain_ops
from zerofx.frontend.plain_graph import PlainGraph


def _save(folder: Path, value: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(value, folder / f"rank{dist.get_rank()}.pt")


POLICY = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
HELD = {"param_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}


def _train(folder: Path, stage: int, options: dict[str, Any]) -> None:
    """One step with a dump; leaves behind what the programs were given and what came out."""
    net = model()
    if options:
        net.batch = nn.Identity()  # on CPUs statistics in fp32 want weights in fp32
    values = {name: value.detach().clone() for name, value in net.named_buffers()}
    loss = step(net, stage, dump=str(folder / "dump"), **options)
    dist.barrier()
    report = json.loads(next((folder / "dump").glob("graph*/report.json")).read_text())
    params = dict(net.named_parameters())
    given, grads, free = [], [], iter(batch())
    for each in report["programs"][1]["inputs"]:
        if each["role"] == "shard":
            given.append(local(params[each["param"]].detach()))
            grads.append(local(params[each["param"]].grad))
        elif each["role"] == "buffer":
            given.append(values[each["param"]])
        else:
            given.append(None if each["role"] == "mesh" else next(free))
    number = report["programs"][1]["num_user_outputs"]
    _save(folder / "forward", given)
    _save(folder / "expected", {"loss": loss, "grads": grads, "num_user_outputs": number})


def _load(folder: Path) -> list[Any]:
    number = len(list(folder.glob("rank*.pt")))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(number)]


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(
    ("stage", "options"),
    [(3, {}), (1, {}), (0, {}), (3, POLICY), (1, POLICY), (0, POLICY), (2, HELD)],
)
def test_forward_and_backward_run_on_their_own(
    stage: int, options: dict[str, Any], tmp_path: Path
) -> None:
    for text in _compared(2, stage, options, tmp_path):
        assert "zerofx import" not in text and "from zerofx." not in text and "# norm\n" in text


CODES = {"quantize_weights": "int4x32", "quantize_gradients": "int4x32"}


@pytest.mark.parametrize(("ranks", "options"), [(2, CODES | POLICY), (4, CODES)])
def test_so_do_quantized_programs(ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    """One hop and two; the kernels' reference is all that the files need of zerofx."""
    options = {**options, "quantize_exact": (), "ranks_per_node": 2}
    forward, backward = _compared(ranks, 3, options, tmp_path)
    assert "unshard_codes(" in forward and "reduce_codes(" in backward
    assert "of which it needs the kernels' reference" in backward


def test_a_program_without_its_arguments_says_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["program.py", "inputs"])
    with pytest.raises(SystemExit, match=r"^usage: torchrun .* INPUTS OUTPUTS"):
        plain_ops.run(None, SimpleNamespace())


class _Centered(nn.Module):
    """Subtracts the mean over a group of its own, and has a name that Python would escape."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.add_module("l\\in", nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.get_submodule("l\\in")(x)
        return (y - all_reduce(y.detach(), "avg", self.group)).square().mean()


def _center(folder: str) -> None:
    groups: dict[str, Any] = {"all": dist.group.WORLD, "own": dist.new_group()}
    for name, group in groups.items():
        options = {"inner": "eager", "min_shard_numel": 0, "dump": f"{folder}/{name}"}
        run = torch.compile(_Centered(group), backend="zero3", options=options)
        run(torch.ones(2, 4)).backward()


def test_the_model_may_communicate_over_the_group_of_all_ranks_only(tmp_path: Path) -> None:
    run_ranks(2, _center, str(tmp_path))
    files = [tmp_path / name / "graph0" / "forward" / "program.py" for name in ("all", "own")]
    names, refused = (compile(file.read_text(), file, "exec").co_names for file in files)
    assert "program" in names and "program" not in refused
    assert "all_reduce.default is over process group" in files[1].read_text()


def test_every_rank_runs_it_on_its_own_device() -> None:
    """Rank 0's, `cuda:0`, is named nowhere."""
    graph = object.__new__(PlainGraph)
    named = {"size": (2, 3), "device": torch.device("cuda", 0)}
    assert graph._mapped(named) == {"size": (2, 3), "device": torch.device("cuda")}


@pytest.mark.parametrize("needed", ["import zerofx", "import torch; torch.ops.zerofx.of"])
def test_what_needs_zerofx_fails_without_it(needed: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(needed)
    with pytest.raises(AssertionError, match=r"zerofx halted|NoneType"):
        run_script(script, ranks=1, without="zerofx")


def _compared(ranks: int, stage: int, options: dict[str, Any], tmp_path: Path) -> list[str]:
    """The files of forward and backward, which were run and computed the bits of the ranks."""
    run_ranks(ranks, _train, tmp_path, stage, options)
    (dump,) = (tmp_path / "dump").glob("graph*")
    folders = [str(tmp_path / name) for name in ("forward", "saved", "backward", "gradients")]
    where: Any = {"without": "" if "quantize_weights" in options else "zerofx", "ranks": ranks}
    run_script(dump / "forward" / "program.py", *folders[:2], str(SEED), **where)
    expected = _load(tmp_path / "expected")
    for rank, (want, got) in enumerate(zip(expected, _load(tmp_path / "saved"), strict=True)):
        number = want["num_user_outputs"]
        (loss,) = [value for value in got[:number] if value.shape == ()]
        assert torch.equal(loss, want["loss"]), f"rank {rank}"
        (tmp_path / "backward").mkdir(exist_ok=True)
        torch.save([*got[number:], torch.ones_like(loss)], tmp_path / "backward" / f"rank{rank}.pt")
    run_script(dump / "backward" / "program.py", *folders[2:], **where)
    for want, got in zip(expected, _load(tmp_path / "gradients"), strict=True):
        grads = _tensors(want["grads"])
        assert len(grads) == len(_tensors(got)) == (8 if options else 10)
        for one, other in zip(_tensors(got), grads, strict=True):
            # Exact means of four ranks are added node by node there, and rank by rank here.
            regrouped = ranks > 2 and one.dim() < 2 and torch.allclose(one, other)
            assert torch.equal(one, other) or regrouped
    return [(dump / name / "program.py").read_text() for name in ("forward", "backward")]
