"""State in rows: as DTensors, in lists of them, in tensors that do not say so, and in extras."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zerofx
from tests.checkpoint.runs import bitwise, full, sharded_by
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import UnsupportedError


def _rows(param: Any) -> Tensor:
    return param.to_local() if hasattr(param, "to_local") else param.detach()


class _Keeping(Optimizer):
    """Remembers of each gradient what it is told."""

    def __init__(self, params: Any, keep: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self._keep = keep

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].update(self._keep(param, param.grad))


KEEPS: dict[str, Any] = {
    "rows": lambda param, grad: {"sum": _rows(grad) + 1},
    "flat": lambda param, grad: {"sum": _rows(grad).flatten() + 1},
    "row_norms": lambda param, grad: {"sum": (_rows(grad) + 1).sum(1)},
    "list": lambda param, grad: {"sum": [torch.zeros(()), _rows(grad) + 1]},
    "tuple": lambda param, grad: {"sum": (_rows(grad) + 1,)},
    "dict": lambda param, grad: {"sum": {"first": [_rows(grad) + 1]}},
}
"""What loses rows where a checkpoint has the first rank's."""


def _stepped(rows: int, keep: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = zerofx.shard(nn.Linear(3, rows, bias=False), sharded_by(3))
    optimizer = _Keeping(model.parameters(), keep)
    (weight,) = model.parameters()
    weight.grad = weight.detach() * 2
    optimizer.step()
    return model, optimizer


def _lost(folder: Path) -> None:
    for rows in (8, 7):
        for name, keep in KEEPS.items():
            model, optimizer = _stepped(rows, keep)
            for save in (checkpoint.save, checkpoint.async_save):
                words = ("weight: sum", "_Keeping", "torch.zeros_like(param)")
                with refused(*words, kind=UnsupportedError):
                    save(folder / name, model, optimizer)
        model, optimizer = _stepped(rows, lambda param, grad: {"pair": (grad, grad)})
        with refused("weight: pair.0 of _Keeping", "a list or a dict", kind=UnsupportedError):
            checkpoint.save(folder / "tuple", model, optimizer)
    assert not [*folder.iterdir()]


def test_rows_that_do_not_say_so_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _lost, tmp_path)


def _kept(folder: Path) -> None:
    rank = dist.get_rank()

    def keep(param: Any, grad: Any) -> dict[str, Any]:
        return {
            "step": torch.tensor(1.0),
            "number": 3,
            "columns": torch.arange(3.0),
            "by_chance": torch.arange(4.0),  # as many as rows of a shard
            "one": torch.ones(1) * rank,
            "whole": torch.ones(8, 3),
        }

    model, optimizer = _stepped(8, keep)
    checkpoint.save(folder, model, optimizer)
    checkpoint.load(folder, model, optimizer)
    (entries,) = optimizer.state.values()
    assert torch.equal(entries["by_chance"], torch.arange(4.0)) and entries["number"] == 3


def test_plain_tensors_that_are_alike_are_saved(tmp_path: Path) -> None:
    run_ranks(2, _kept, tmp_path / "a")


def _in_extras(folder: Path) -> None:
    model, _ = _stepped(7, KEEPS["list"])
    average = copy.deepcopy(model)
    (weight,) = model.parameters()
    one = types.SimpleNamespace(shadow={"weight": weight.detach().clone()})
    extras = {
        "extra.ema.weight": {"step": 1, "ema": average.state_dict()},
        "extra.1.norm": (0, [{"norm": 1}], {"norm": weight.norm()})[1:],
        "shape [7, 3]": {"ema": one},
    }
    for words, extra in extras.items():
        for save in (checkpoint.save, checkpoint.async_save):
            with refused(words, "full_state_dict(ema)", "ModuleDict", kind=UnsupportedError):
                save(folder / "a", model, extra=extra)
    whole = checkpoint.full_state_dict(average)
    loss = weight.full_tensor().sum()  # what has a history can be pickled, though not copied
    checkpoint.async_save(folder / "b", model, extra={"ema": whole, "loss": loss}).wait()
    found = checkpoint.load(folder / "b", model)
    bitwise(found["ema"], {"weight": full(average.weight)})
    assert found["loss"].item() == loss.item()


def test_an_extra_with_rows_is_refused(tmp_path: Path) -> None:
    run_ranks(2, _in_extras, tmp_path)


def _listed(folder: Path) -> None:
    def keep(param: Any, grad: Any) -> dict[str, Any]:
        nested = [[grad * 4], {"a": grad * 5}]
        return {"sums": [grad.clone(), torch.zeros(()), grad * 3, nested], "names": ["a", "b"]}

    def tensors(optimizer: Optimizer) -> dict[str, Tensor]:
        (entries,) = optimizer.state.values()
        first, _, second, (third, fourth) = entries["sums"]
        found = {"first": first, "second": second, "third": third[0], "fourth": fourth["a"]}
        return {key: full(value) for key, value in found.items()}

    for rows in (8, 7):
        model, optimizer = _stepped(rows, keep)
        wanted = tensors(optimizer)
        checkpoint.save(folder / "a", model, optimizer)
        checkpoint.async_save(folder / "b", model, optimizer).wait()
        checkpoint.save(folder / "c", model, optimizer, node_local=True)
        for name in "abc":
            model, again = _stepped(rows, lambda param, grad: keep(param, grad * 0))
            checkpoint.load(folder / name, model, again, node_local=name == "c")
            bitwise(tensors(again), wanted)


def test_lists_of_rows_are_saved_whole(tmp_path: Path) -> None:
    run_ranks(2, _listed, tmp_path)


@pytest.mark.parametrize("keep", [KEEPS["rows"], KEEPS["list"]])
def test_one_process_has_all_rows(tmp_path: Path, keep: Any) -> None:
    model = nn.Linear(3, 4, bias=False)
    optimizer = _Keeping(model.parameters(), keep)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    checkpoint.save(tmp_path, model, optimizer)
    again = _Keeping(model.parameters(), keep)
    checkpoint.load(tmp_path, model, again)
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
