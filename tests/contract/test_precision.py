"""What users see of mixed precision: dtypes at every place, options, and refusals."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx
from tests.hard.pair import full
from tests.hard.wire import watched
from tests.oracle import assert_same, train
from tests.ranks import run_ranks
from zerofx.errors import ConfigError, ShardingError

BF16 = torch.bfloat16
FAST: dict[str, Any] = {"inner": "eager", "min_shard_numel": 20}


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Not registered with torch's nests."""

    name: str
    x: Tensor
    unset: int = dataclasses.field(init=False)


class Seen(nn.Module):
    """Notes the dtypes that its forward meets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, given: Numbers, *, ids: Tensor) -> dict[str, Any]:
        x = given.x
        self.seen.update(x=x.dtype, ids=ids.dtype, weight=self.first.weight.dtype)
        self.seen.update(bias=self.first.bias.dtype, scale=self.scale.dtype, steps=self.steps.dtype)
        y = self.last(self.norm(torch.tanh(self.first(x) * self.scale.to(x.dtype))))
        return {"y": [Numbers(given.name, y)], "ids": ids}


def _meet(stage: int, compiled: bool, **precision: Any) -> dict[str, torch.dtype]:
    model = Seen()
    zerofx.shard(model, zerofx.ZeroConfig(stage=stage, **FAST, **precision))  # pyright: ignore
    run: Any = torch.compile(model, backend=f"zero{stage}") if compiled else model
    given = Numbers("given", torch.randn(2, 8))
    out = run(given, ids=torch.arange(2))
    assert given.x.dtype is torch.float32
    assert out["ids"].dtype is torch.int64
    assert out["y"][0].name == "given"
    out["y"][0].x.float().square().sum().backward()
    for param in model.parameters():
        assert isinstance(param, DTensor) and param.dtype is torch.float32
        assert param.grad is not None and param.grad.dtype is torch.float32
    return {**model.seen, "y": out["y"][0].x.dtype}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_dtypes(stage: int, compiled: bool) -> None:
    """Sharded and replicated parameters follow, whoever reads them; buffers and integers do not."""
    policies: list[dict[str, Any]] = [
        {"param_dtype": BF16},
        {"param_dtype": BF16, "output_dtype": torch.float64},
    ]
    for precision in policies:
        for seen in run_ranks(2, _meet, stage, compiled, **precision):
            y = precision.get("output_dtype", BF16)
            low = dict.fromkeys(("x", "weight", "bias"), BF16)
            fixed = {"ids": torch.int64, "scale": torch.float32, "steps": torch.int64}
            assert seen == {**low, **fixed, "y": y}


def test_inputs_are_cast_only_if_asked() -> None:
    with pytest.raises(Exception, match=r"same dtype"):
        run_ranks(2, _meet, 3, False, param_dtype=BF16, cast_forward_inputs=False)


class Tokens(nn.Module):
    """Nothing to cast at its border."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(ids)), ids)


def _one_line(how: str) -> str:
    model: nn.Module = Tokens()
    inputs = torch.arange(4)
    if how != "tokens":
        model, inputs = _Wrapper(nn.Linear(8, 8)), torch.randn(2, 8)
    options = {**FAST, "param_dtype": BF16}
    if how == "output":
        options["output_dtype"] = torch.float64
    run: Any = model
    if how == "in place":
        model.compile(backend="zero3", options=options)
    else:
        run = torch.compile(model, backend="zero3", options=options)
    try:
        return str(run(inputs).dtype)
    except ShardingError as error:
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        return str(error)


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_one_line_casts_or_says_why_not() -> None:
    for how in ("tokens", "floats"):
        assert run_ranks(2, _one_line, how) == ["torch.bfloat16"] * 2
    assert run_ranks(2, _one_line, "output") == ["torch.float64"] * 2
    # The call of the model has begun when zerofx hears of it: its border is behind.
    for text in run_ranks(2, _one_line, "in place"):
        assert "cast_forward_inputs" in text and "zerofx.shard(model" in text
        assert "is running already" in text


def _in_place() -> list[str]:
    model = Seen()
    zerofx.shard(model, zerofx.ZeroConfig(param_dtype=BF16, **FAST))
    model.compile(backend="zero3")
    given = Numbers("given", torch.randn(2, 8))
    outs = [model(given, ids=torch.arange(2)) for _ in range(2)]
    return [str(out["y"][0].x.dtype) for out in outs]


def test_compiled_in_place() -> None:
    assert run_ranks(2, _in_place) == [["torch.bfloat16"] * 2] * 2


def _copied(stage: int) -> bool:
    model = Tokens()
    zerofx.shard(model, zerofx.ZeroConfig(stage=stage, param_dtype=BF16, **FAST))  # pyright: ignore
    twin = copy.deepcopy(model)
    ids = torch.arange(4)
    first = model(ids)
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(2.0)
    changed = twin(ids)
    return bool(first.dtype is changed.dtype is BF16 and not torch.equal(first, changed))


@pytest.mark.parametrize("stage", [1, 3])
def test_copies_keep_the_policy(stage: int) -> None:
    assert run_ranks(2, _copied, stage) == [True, True]


def _bytes(stage: int, precision: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    options = {"inner": "eager", "memory_budget": 0 if stage == 3 else None, **precision}
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent = {}
    for _ in range(3):
        x = torch.randn(2, 64)
        with watched() as forward:
            loss = run(x).float().square().mean()
        with watched() as backward:
            loss.backward()
        optimizer.step()
        sent = {"forward": forward.sent_bytes(2), "backward": backward.sent_bytes(2)}
    return sent


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_half_the_bytes_at_the_process_group(stage: int) -> None:
    """Gathers follow `param_dtype`, reductions `reduce_dtype`, and each alone."""
    weights = 2 * 64 * 64 / 2 * (2 if stage == 0 else 1)
    # Backward does not need the first weight: its input has no gradient.
    gathers = {0: (0, 0), 1: (1, 0), 2: (1, 0), 3: (1, 0.5)}[stage]
    share = weights if stage else 0
    rows = [
        ({}, 4, 4),
        ({"param_dtype": BF16}, 2, 2),
        ({"param_dtype": BF16, "reduce_dtype": torch.float32}, 2, 4),
        ({"reduce_dtype": BF16}, 4, 2),
    ]
    for precision, gathered, reduced in rows:
        for sent in run_ranks(2, _bytes, stage, precision):
            assert sent["forward"] == gathers[0] * share * gathered
            wanted = gathers[1] * share * gathered + weights * reduced
            if stage == 0:
                # Below the size at which it pays to travel in two hops, sums are exchanged in fp32.
                wanted = weights * 4
            assert sent["backward"] == wanted


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("value", ["bf16", torch.int64, torch.float8_e4m3fn])
def test_options_are_dtypes(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        zerofx.ZeroConfig(**{name: value})


def _large() -> tuple[bool, float]:
    """Whether the gradient is the mean of both ranks', rounded once; bytes sent in backward."""
    torch.manual_seed(0)
    model = nn.Linear(512, 601, bias=False)
    low = model.weight.detach().to(BF16).requires_grad_()
    run = torch.compile(model, backend="zero0", options={**FAST, "param_dtype": BF16})
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = run(x).float().square().mean()
    with watched() as wire:
        loss.backward()
    F.linear(x.to(BF16), low).float().square().mean().backward()
    assert low.grad is not None
    mean = low.grad.float()
    dist.all_reduce(mean)
    wanted = (mean / 2).to(BF16).float()
    (weight,) = model.parameters()
    return torch.equal(full(weight.grad), wanted), wire.sent_bytes(2)


def test_large_replicated_gradients_travel_in_16_bits_and_are_added_in_32() -> None:
    for right, sent in run_ranks(2, _large):
        assert right and sent == pytest.approx(2 * 512 * 601 * 2 / 2, rel=1e-3)


def _several(stage: int) -> bool:
    torch.manual_seed(0)
    kinds = (torch.float64, torch.float32, BF16)
    model = nn.Sequential(*(nn.Linear(8, 8, dtype=dtype) for dtype in kinds))
    low = copy.deepcopy(model).to(BF16)
    x = torch.randn(4, 8)
    options = {**FAST, "param_dtype": BF16}
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    loss, wanted = run(x).float().square().mean(), low(x.to(BF16)).float().square().mean()
    loss.backward()
    wanted.backward()
    for param, twin in zip(model.parameters(), low.parameters(), strict=True):
        assert param.grad is not None and param.grad.dtype is param.dtype
        assert torch.equal(full(param.grad), twin.grad.to(param.dtype))  # type: ignore[union-attr]
    return bool(loss == wanted)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_of_several_dtypes_share_one(stage: int) -> None:
    """All floating-point parameters follow, in one bucket; gradients end in their own dtypes."""
    assert run_ranks(2, _several, stage) == [True, True]


def test_held_back_gradients_are_summed_in_the_dtype_of_reductions() -> None:
    """Sums of bf16 gradients in bf16 would differ in the third digit."""
    precision = {"param_dtype": BF16, "reduce_dtype": torch.float32}
    job: dict[str, Any] = {"precision": precision, "micro_batches": 2, "timeout": 120}
    every = run_ranks(2, train, "mlp", "zero1", options={"inner": "eager"}, **job)
    once = run_ranks(2, train, "mlp", "zero1", options={"inner": "eager", "accumulate": 2}, **job)
    assert_same(once, every, rtol=1e-5)
