"""One rank may compile anew alone; a rank that may not do so any more says so."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx
from tests.fingerprint.chain import OPTIONS, WIDTH, Chain, fit
from tests.hard.pair import EAGER, Pair, average, draw, same_gradients
from tests.models import batch, make
from tests.ranks import RanksFailed, run_ranks
from zerofx.errors import UnsupportedError


def _fit_with_new_length() -> tuple[list[float], int]:
    def rows(step: int) -> int:
        return 7 if step == 1 and dist.get_rank() == 1 else 4

    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    losses = fit(Chain(), 3, steps=4, rows=rows)
    return losses, torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


def test_one_rank_recompiles_alone() -> None:
    (first, graphs), (second, more) = run_ranks(2, _fit_with_new_length, timeout=220)
    assert (graphs, more) == (1, 2)
    assert first[0] == second[0] and len(first) == len(second) == 4


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.listed = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum((p.square().sum() for p in self.listed.parameters()), x.new_zeros(()))
        return self.read(x).square().sum() + penalty


def _replaced_by_one_more_row(name: str, stage: int) -> None:
    torch.manual_seed(0)
    pair, wider = Pair(_Heads(), stage, rtol=1e-6), nn.Linear(7, 4)
    for number, rows in enumerate((3, 4)):
        if rows == 4:
            for model in (pair.model, pair.plain):
                setattr(model, name, copy.deepcopy(wider))
        pair.backward(lambda run, seed: run(draw(2, 7, seed=seed)), number)
        average(pair.plain)
        same_gradients(pair.model, pair.plain, 1e-6)


@pytest.mark.parametrize(("name", "stage"), [("read", 1), ("listed", 3)])
def test_a_parameter_of_which_this_rank_has_as_many_rows_as_before(name: str, stage: int) -> None:
    """Dynamo's guard of a `DTensor` looks at these alone, and rank 0 has two of three and four."""
    run_ranks(2, _replaced_by_one_more_row, name, stage)


def _fit_past_the_limit() -> None:
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        rank = dist.get_rank()
        fit(Chain(), 3, steps=4, rows=lambda step: 4 + (step if rank == 1 else 0))


def test_the_recompile_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.GRACE_SECONDS", 1.0)  # rank 0 waits for the other
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _fit_past_the_limit, timeout=60)
    failure = failed.value.failures[1]
    assert failure.kind == "UnsupportedError"
    assert "Chain.forward was recompiled too often" in failure.message
    assert "layers.0.weight" in failure.message and "recompile_limit" in failure.message


def _past_the_limit_of_one_model() -> None:
    run: Any = torch.compile(Chain(), backend="zero3", options=OPTIONS, recompile_limit=1)
    run(torch.randn(4, WIDTH))
    with pytest.raises(UnsupportedError, match=r"Chain.forward was recompiled too often"):
        run(torch.randn(5, WIDTH))


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason="torch.compile takes no limit",
)
def test_a_limit_given_to_torch_compile_is_one_too() -> None:
    run_ranks(2, _past_the_limit_of_one_model)


def _many_models() -> list[float]:
    with torch._dynamo.config.patch(recompile_limit=2):
        kept = [Chain() for _ in range(3)]
        losses = [fit(model, 3, steps=1)[0] for model in kept]
        losses += [fit(Chain(), 3, steps=1)[0] for _ in range(3)]
        return losses + fit(kept[0], 3, steps=1)


@pytest.mark.skipif(
    not hasattr(torch._dynamo.eval_frame, "_next_isolate_recompiles_id"),
    reason="torch counts the programs of all models of a class together",
)
def test_each_model_has_a_limit_of_its_own() -> None:
    """As many as one likes, alive and gone, as in a search for hyperparameters."""
    assert all(map(math.isfinite, itertools.chain(*run_ranks(2, _many_models))))


def _two_models_with_one_limit() -> str:
    """Where models are compiled in place, Dynamo counts variants of a function for all of them."""

    def fit_in_place(model: Chain) -> None:
        zerofx.shard(model, zerofx.ZeroConfig(stage=1, **OPTIONS))
        model.compile(backend="zero1", options=OPTIONS)
        model(torch.ones(4, WIDTH)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    with torch._dynamo.config.patch(recompile_limit=1):
        fit_in_place(Chain())
        second = Chain()
        try:
            fit_in_place(second)
        except UnsupportedError as error:
            torch.compiler.reset()  # the remedy
            fit_in_place(second)
            assert all(isinstance(param, DTensor) for param in second.parameters())
            return str(error)
    return ""


def test_a_model_that_dynamo_never_compiled_is_an_error() -> None:
    for message in run_ranks(2, _two_models_with_one_limit):
        assert "recompile_limit" in message and "layers.0.weight" in message, message


def _without_programs(name: str, stage: int) -> None:
    """Where Dynamo runs a compiled model's code as it is, markers compute what programs do."""
    pair = Pair(make(name), stage, {**EAGER, "accumulate": 2}, rtol=1e-6)

    def loss(run: Any, number: int) -> Tensor:
        return run(*batch(name, dist.get_rank(), number))

    for number, stance in enumerate(("default", "force_eager", "force_eager", "default")):
        with torch.compiler.set_stance(stance):
            pair.backward(loss, number)
        if number % 2:
            pair.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_code_that_runs_without_its_program_trains_the_same(stage: int) -> None:
    for name in ("frozen", "twice"):
        run_ranks(2, _without_programs, name, stage)
