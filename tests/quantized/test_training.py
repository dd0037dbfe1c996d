"""Quantized training on real ranks: what travels, what is learnt, what it goes together with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.device import DEVICE
from tests.hard.pair import EAGER, Pair, full
from tests.hard.wire import watched
from tests.models import batch, make
from tests.quantized.test_values import SHAPES, Weights, grads_of
from tests.ranks import run_ranks

CODES = {"quantize_weights": "int8x64", "quantize_gradients": ("int8x64", "int8x64.stochastic")}
"""Of two hops; one hop uses the first."""


def _calls(options: dict[str, Any]) -> tuple[list[int], list[int], set[torch.dtype]]:
    """Sizes of what a forward and a backward send, and dtypes of all that they send or receive."""
    model = Weights()
    settings = {"inner": "eager", "quantize_exact": (), "bucket_bytes": 1 << 20, **options}
    run = torch.compile(model, backend="zero3", options=settings)
    run(grads_of(dist.get_rank()))[0].backward()  # shards the model, and compiles
    with watched() as forward:
        loss, _ = run(grads_of(dist.get_rank()))
    with watched() as backward:
        loss.backward()
    return forward.numels("isend"), backward.numels("isend"), forward.dtypes | backward.dtypes


def _parcel(codec_bits: int, block: int) -> int:
    blocks = sum(-(-(-(-rows // 4) * width) // block) for rows, width in SHAPES)
    return blocks * block * codec_bits // 8 + -(-blocks // 4) * 16


def test_process_groups_get_bytes_with_scales_inside() -> None:
    options = {
        "quantize_weights": "int8x64",
        "quantize_gradients": ("int4x64", "int8x64"),
        "ranks_per_node": 2,
    }
    one, four = _parcel(8, 64), _parcel(4, 64)
    for forward, backward, dtypes in run_ranks(4, _calls, options, timeout=120):
        assert dtypes == {torch.uint8}
        # To the node and to the column, then what came along the column to the node.
        assert forward == [one] * 3
        # Two parcels to the neighbour in the node, one to the other node.
        assert backward == [2 * four, one]


def _trained(options: dict[str, Any], steps: int) -> float:
    """Loss on data not trained on, of next tokens that follow from the two before."""
    torch.manual_seed(0)
    model = make("gpt")
    run = torch.compile(model, backend="zero3", options={**EAGER, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        run(*_walks(2 * number + dist.get_rank())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return _loss(run)


def _loss(run: Any) -> float:
    with torch.no_grad():
        return float(sum(run(*_walks(10_000 + number)) for number in range(8)) / 8)


def _walks(seed: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Tokens that go on by 7, modulo 31; every tenth is anything."""
    drawn = torch.Generator().manual_seed(seed)
    ids = (torch.randint(31, (rows, 1), generator=drawn) + 7 * torch.arange(7)) % 31
    noise = torch.rand(ids.shape, generator=drawn) < 0.1
    ids = torch.where(noise, torch.randint(31, ids.shape, generator=drawn), ids)
    return ids[:, :-1].contiguous().to(DEVICE), ids[:, 1:].contiguous().to(DEVICE)


ALL_THREE = {
    "quantize_weights": "int8x64",
    "quantize_gradients": ("int8x64", "int4x64"),
    "secondary_shards": True,
}


def learnt(steps: int) -> tuple[float, float, float]:
    nodes = {"ranks_per_node": 2}
    return _loss(make("gpt")), _trained(nodes, steps), _trained({**nodes, **ALL_THREE}, steps)


def test_a_gpt_learns_as_well_as_with_numbers() -> None:
    """qwZ, qgZ and hpZ on two nodes of two ranks."""
    before, exact, quantized = run_ranks(4, learnt, 60, timeout=200)[0]
    assert exact < before - 1
    assert quantized != exact and abs(quantized / exact - 1) < 0.01


def _pair(name: str, options: dict[str, Any], stage: int, rtol: float) -> None:
    torch.compiler.reset()
    pair = Pair(make(name), stage, {**EAGER, **options}, rtol=rtol)
    pair.train(lambda run, number: run(*batch(name, dist.get_rank(), number)), 2)
    with torch.no_grad():
        inputs = batch(name, dist.get_rank(), 9)
        ours, plain = (float(run(*inputs)) for run in (pair.run, pair.plain))
    assert abs(ours / plain - 1) <= rtol


def variety() -> None:
    exact = {**CODES, "disable": ("quantize_unshards", "quantize_reduces")}
    _pair("gpt", exact, 3, 0.0)
    for name in ("gpt_checkpointed", "frozen", "odd", "mixed"):
        _pair(name, CODES, 3, 0.05)
    for stage in (1, 2):
        _pair("gpt", {"quantize_gradients": "int8x64"}, stage, 0.05)
    _pair(
        "gpt", {**CODES, "bucket_bytes": 0, "prefetch_bytes": 0, "memory_budget": 1 << 20}, 3, 0.05
    )


def test_goes_together_with_all_else() -> None:
    run_ranks(2, variety, timeout=200)


def _low_precision() -> tuple[set[torch.dtype], float]:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    pair = Pair(make("gpt"), 3, {**EAGER, **CODES, **dtypes}, rtol=0.1)
    for number in range(2):
        loss = pair.run(*batch("gpt", dist.get_rank(), number))
        loss.backward()
        pair.plain(*batch("gpt", dist.get_rank(), number)).backward()
    grads = [full(param.grad) for param in pair.model.parameters()]
    wanted = [param.grad for param in pair.plain.parameters()]
    for grad in wanted:
        dist.all_reduce(grad)
    found = torch.cat([grad.reshape(-1) for grad in grads])
    plain = torch.cat([grad.reshape(-1) / 2 for grad in wanted if grad is not None])
    return {grad.dtype for grad in grads}, float((found - plain).norm() / plain.norm())


def test_goes_together_with_mixed_precision_and_accumulation() -> None:
    for dtypes, error in run_ranks(2, _low_precision, timeout=120):
        assert dtypes == {torch.float32} and error < 0.05
