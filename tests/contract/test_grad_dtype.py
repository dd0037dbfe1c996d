"""`grad_dtype`: what users see of gradients that wait for the optimizer in another dtype."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx
from tests.hard.pair import draw, full
from tests.ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "one by one": lambda params: torch.optim.NAdam(params, lr=0.01, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """Sharded and replicated parameters; one that is tied, one that is frozen."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 24), nn.LayerNorm(24)
        self.last = nn.Linear(24, 8)
        self.again = nn.Linear(8, 24, bias=False)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.first(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(torch.relu(self.again(self.last(self.frozen(y)))))


def _net(stage: int, breaks: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net(breaks)
    given = {"inner": "eager", "min_shard_numel": 30, **options}
    zerofx.shard(model, zerofx.ZeroConfig(stage=stage, **given))  # pyright: ignore
    return model, torch.compile(model, backend=f"zero{stage}")


def _loss(run: Any, step: int) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return run(x).float().square().mean()


def _trained(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.requires_grad]


def _grads(model: nn.Module) -> list[Tensor]:
    """Full gradients, each of the dtype that it and what is computed from it say."""
    found: list[Tensor] = []
    for param in _trained(model):
        grad = param.grad
        assert isinstance(param, DTensor) and isinstance(grad, DTensor)
        assert (grad * 1).full_tensor().dtype is (grad * 1).dtype is grad.dtype
        found.append(full(grad))
    return found


def _round(model: nn.Module) -> None:
    """What `grad_dtype` does, by hand."""
    for param in _trained(model):
        param.grad = None if param.grad is None else param.grad.to(BF16).float()


def _trains(stage: int, policy: dict[str, Any]) -> None:
    models = [_net(stage, grad_dtype=BF16, **policy), _net(stage, **policy)]
    for kind in OPTIMIZERS if stage == 2 else ["foreach"]:
        _trains_on(kind, models)


def _trains_on(kind: str, models: list[tuple[nn.Module, Any]]) -> None:
    seen: set[torch.dtype] = set()
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model, _ in models]

    def see(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.update(p.grad.dtype for p in optimizer.param_groups[0]["params"] if p.grad is not None)

    optimizers[0].register_step_pre_hook(see)
    for step in range(3):
        for (model, run), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _loss(run, step).backward()
            if optimizer is optimizers[1]:
                _round(model)
            else:
                assert {grad.dtype for grad in _grads(model)} == {BF16}
            optimizer.step()
    assert seen == {FP32}, "what the optimizer sees"
    assert {grad.dtype for grad in _grads(models[0][0])} == {BF16}, "after the step"
    for mine, other in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert mine.dtype is FP32 and torch.equal(full(mine), full(other))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_that_with_rounded_gradients(stage: int) -> None:
    """Bit for bit; the optimizer's own state stays in fp32."""
    run_ranks(2, _trains, stage, {"param_dtype": BF16})


@pytest.mark.parametrize("stage", [0, 2])
def test_without_a_policy(stage: int) -> None:
    run_ranks(2, _trains, stage, {})
    run_ranks(2, _trains, stage, {"reduce_dtype": FP32, "param_dtype": BF16})


def _outside_of_programs(stage: int) -> None:
    for eager in (True, False):
        model, run = _net(stage, breaks=True, grad_dtype=BF16, param_dtype=BF16)
        plain, other = _net(stage, breaks=True, param_dtype=BF16)
        _loss(model if eager else run, 0).backward()
        _loss(plain if eager else other, 0).backward()
        for mine, wanted in zip(_grads(model), _grads(plain), strict=True):
            assert mine.dtype is BF16 and torch.equal(mine, wanted.to(BF16))


@pytest.mark.parametrize("stage", [1, 3])
def test_code_outside_of_programs(stage: int) -> None:
    """Parts behind a graph break, and a model that is not compiled at all."""
    run_ranks(2, _outside_of_programs, stage)


def _micro_batches(stage: int) -> None:
    model, run = _net(stage, grad_dtype=BF16)
    plain, other = _net(stage)
    wanted: list[Tensor] = []
    for step in range(2):
        _loss(run, step).backward()
        plain.zero_grad()
        _loss(other, step).backward()
        grads = [grad.to(BF16) for grad in _grads(plain)]
        wanted = [a + b for a, b in zip(wanted, grads, strict=True)] if wanted else grads
    for mine, total in zip(_grads(model), wanted, strict=True):
        assert torch.equal(mine, total)
    # Held back, they add up as they travel, and are rounded once.
    model, run = _net(stage, grad_dtype=BF16, accumulate=2)
    plain.zero_grad()
    for step in range(2):
        _loss(run, step).backward()
        _loss(other, step).backward()
    if stage < 2:
        for mine, total in zip(_grads(model), _grads(plain), strict=True):
            torch.testing.assert_close(mine.float(), total, rtol=2**-8, atol=0)


@pytest.mark.parametrize("stage", [1, 2])
def test_micro_batches(stage: int) -> None:
    """Each backward of a step is rounded, unless `accumulate` holds it back."""
    run_ranks(2, _micro_batches, stage)


def _wide(stage: int) -> None:
    """A model in bf16 whose micro-batches add up in fp32."""
    torch.manual_seed(0)
    model = Net().to(BF16)
    zerofx.shard(model, zerofx.ZeroConfig(stage=stage, inner="eager", grad_dtype=FP32))  # pyright: ignore
    run = torch.compile(model, backend=f"zero{stage}")
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(BF16)
        run(x).float().square().mean().backward()
        rounded = [torch.equal(grad, grad.to(BF16).float()) for grad in _grads(model)]
        assert all(rounded) is (step == 0), "each is in bf16, their sum is not"
    assert {grad.dtype for grad in _grads(model)} == {FP32}
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert {param.dtype for param in model.parameters()} == {BF16}
    assert {each["exp_avg"].dtype for each in optimizer.state.values()} == {BF16}


def test_a_wider_dtype_than_the_parameters() -> None:
    run_ranks(2, _wide, 2)


def _copies(stage: int) -> None:
    model, run = _net(stage, grad_dtype=BF16, param_dtype=BF16)
    _loss(run, 0).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = torch.compile(twin, backend=f"zero{stage}")
        _loss(again, 0).backward()
        for mine, other in zip(_grads(twin), _grads(model), strict=True):
            assert mine.dtype is BF16 and torch.equal(mine, other)
        optimizer = torch.optim.AdamW(twin.parameters())
        optimizer.step()
        optimizer.zero_grad()
        _loss(again, 1).backward()
        assert {grad.dtype for grad in _grads(twin)} == {BF16}


def test_copies_keep_it() -> None:
    run_ranks(2, _copies, 2)


def _heard_before() -> list[torch.dtype]:
    """Hooks of parameters that were there before sharding come after the cast."""
    model, heard = nn.Linear(7, 9), list[torch.dtype]()
    handle = model.weight.register_post_accumulate_grad_hook(
        lambda param: heard.append(cast(Tensor, param.grad).dtype)
    )
    zerofx.shard(model, zerofx.ZeroConfig(inner="eager", min_shard_numel=0, grad_dtype=BF16))
    for run in (model, torch.compile(model, backend="zero3")):
        cast(Any, run)(draw(4, 7)).sum().backward()
    handle.remove()
    model(draw(4, 7)).sum().backward()
    assert {grad.dtype for grad in _grads(model)} == {BF16}
    return heard


def test_hooks_from_before_hear_of_it() -> None:
    assert run_ranks(2, _heard_before) == [[BF16, BF16]] * 2


def _applied_at_once(param: Tensor) -> Callable[[Tensor], None]:
    optimizer = torch.optim.AdamW([param], lr=0.1)

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _around_the_step(stage: int) -> list[Any]:
    """Clipping, a scaler that skips, an optimizer inside backward."""
    model, run = _net(stage, grad_dtype=BF16, param_dtype=BF16)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", 2.0**4)
    before = [full(param).clone() for param in model.parameters()]
    for loss in (_loss(run, 0) * torch.inf, _loss(run, 1)):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(a, full(b)) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) is not bool(norm.isfinite())
    total = sum(grad.float().square().sum() for grad in _grads(model))
    assert float(total) ** 0.5 == pytest.approx(0.01, rel=0.02)
    for param in _trained(model):
        param.register_post_accumulate_grad_hook(_applied_at_once(param))
    optimizer.zero_grad()
    before = [full(param).clone() for param in _trained(model)]
    _loss(run, 2).backward()
    assert all(param.grad is None for param in model.parameters())
    assert not any(torch.equal(a, full(b)) for a, b in zip(before, _trained(model), strict=True))
    return [scaler.get_scale()]


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_scaling_and_an_optimizer_in_backward(stage: int) -> None:
    assert run_ranks(2, _around_the_step, stage) == [[2.0**3]] * 2


def _other_sizes() -> None:
    """One rank alone compiles while gradients wait, and nothing breaks its graph."""
    model, _ = _net(3, grad_dtype=BF16)
    run = torch.compile(model, backend="zero3", fullgraph=True)
    _loss(run, 0).backward()
    before = [param.grad for param in _trained(model)]
    run(torch.ones(4 + dist.get_rank(), 8)).float().square().mean().backward()
    for param, grad in zip(_trained(model), before, strict=True):
        assert grad is not None and param.grad is grad and grad.dtype is BF16


def test_frames_compiled_while_gradients_wait() -> None:
    run_ranks(2, _other_sizes)


def _replaced() -> None:
    """An optimizer steps a parameter that the model has no longer, with the gradient it got."""
    model, run = _net(2, grad_dtype=BF16)
    optimizer, old = torch.optim.AdamW(model.parameters(), lr=0.1), model.last.weight
    _loss(run, 0).backward()
    before = full(old.detach())
    model.last = nn.Linear(24, 8)
    with torch.no_grad():
        run(torch.ones(4, 8))  # the model notices
    optimizer.step()
    assert old.grad is not None and old.grad.dtype is FP32
    assert not torch.equal(full(old.detach()), before)


def test_a_parameter_that_was_replaced_before_the_step() -> None:
    run_ranks(2, _replaced)
