"""The oracle: DDP, `fully_shard` and a single process agree on the whole zoo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.models import ZOO, batch, make
from tests.oracle import Result, assert_same, difference, train
from tests.ranks import run_ranks
from zerofx.torch_private import graph_breaks


def _three_ways(world_size: int, name: str, how: list[str], **kwargs: Any) -> list[list[Result]]:
    """Several trainings in one job, since the way to the ranks costs as much as a training.

    "single" is trained in a group of one: at W > 1 zerofx refuses a step with gradients that no
    rank exchanged, and these processes may have loaded it.
    """
    distributed = [one for one in how if one != "single"]
    results: dict[str, list[Result]] = {}
    if distributed:
        by_rank = run_ranks(world_size, _train_all, name, distributed, **kwargs)
        results.update(zip(distributed, map(list, zip(*by_rank, strict=True)), strict=True))
    if "single" in how:
        results["single"] = run_ranks(1, train, name, "single", world_size=world_size, **kwargs)
    return [results[one] for one in how]


def _train_all(name: str, how: list[str], **kwargs: Any) -> list[Result]:
    return [train(name, one, **kwargs) for one in how]


@pytest.mark.parametrize("name", ZOO)
def test_two_ranks_agree_bitwise_without_clipping(name: str) -> None:
    ddp, single = _three_ways(2, name, ["ddp", "single"])
    assert_same(ddp, single, rtol=0, keys=["losses", "params"])
    assert_same(ddp, single, rtol=1e-6)
    assert_same(ddp[:1], single[:1], rtol=0, keys=["buffers", "grads"])
    if not ZOO[name].fsdp:
        return
    (sharded,) = _three_ways(2, name, ["fully_shard"])
    # FSDP2 averages bf16 gradients in another order.
    exact = name != "mixed"
    assert_same(sharded, ddp, rtol=0 if exact else 1e-2, keys=["losses", "params", "grads"])
    assert_same(sharded, ddp, rtol=1e-6 if exact else 1e-2)


@pytest.mark.parametrize("name", ["gpt", "cnn", "moe", "thin"])
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_four_ranks_agree_with_adamw_and_clipping(
    name: str, dtype: torch.dtype, rtol: float
) -> None:
    ways = ["ddp", "fully_shard", "single"]
    ddp, sharded, single = _three_ways(4, name, ways, optimizer="adamw", clip=0.3, dtype=dtype)
    assert_same(ddp, single, rtol=rtol)
    assert_same(sharded, single, rtol=rtol)
    assert all(norm > 0.3 for norm in ddp[0]["norms"]), "nothing was clipped"


def test_rank_0_wins_batches_may_differ_in_size_and_gradients_accumulate() -> None:
    common = {"rows": [5, 2], "micro_batches": 2, "steps": 3}
    (want,) = _three_ways(2, "mlp", ["single"], **common)
    got = _three_ways(2, "mlp", ["ddp", "fully_shard"], **common, rank_seeds=True)
    for one in got:
        assert_same(one, want, rtol=1e-6)


def test_one_process_stands_for_two_ranks() -> None:
    alone = run_ranks(1, train, "mlp", "single", world_size=2)
    assert_same(run_ranks(2, train, "mlp", "ddp"), alone, rtol=0, keys=["losses", "params"])


def test_differences_are_found() -> None:
    def result(value: float, grad: torch.Tensor | None = None) -> Result:
        weight = torch.tensor([1.0, value])
        return Result(
            losses=[value], norms=[1.0], params={"w": weight}, grads={"w": grad}, buffers={}
        )

    assert_same([result(1.0)] * 2, [result(1.0)], rtol=0)
    with pytest.raises(AssertionError, match=r"params.w: 1.00e-03"):
        assert_same([result(0.999)] * 2, [result(1.0)], rtol=1e-6, keys=["params"])
    with pytest.raises(AssertionError, match=r"params.w: inf"):
        assert_same([result(1.0), result(0.999)], [result(1.0)], rtol=1e-2)
    with pytest.raises(AssertionError, match=r"params.w: inf"):
        assert_same([result(float("nan"))], [result(1.0)], rtol=1e-2, keys=["params"])
    absent, zero = result(1.0), result(1.0, torch.zeros(2))
    assert difference([absent], [zero], ["grads"]) == {"grads.w": float("inf")}


# Dynamo itself reads `.grad` of a non-leaf input when it resumes after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_what_it_says(name: str) -> None:
    entry, model = ZOO[name], make(name)
    assert all(map(torch.equal, model.parameters(), make(name).parameters()))
    inputs = [batch(name, rank, step)[0] for rank in range(2) for step in range(2)]
    assert not any(torch.equal(inputs[0], other) for other in inputs[1:])
    loss = model(*batch(name, 0, 0))
    loss.backward()
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert entry.unused == any(p.grad is None for p in trainable)
    torch.compiler.reset()
    graphs = CompileCounter()
    torch.compile(model, backend=graphs)(*batch(name, 0, 0))
    assert (graphs.frame_count == 1 and not graph_breaks()) is not entry.graph_breaks
