"""Frozen weights are coded once, and their codes travel again and again."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zerofx
from tests.hard.pair import draw
from tests.ranks import run_ranks
from zerofx.codegen.reference import Reference
from zerofx.ir.kernels import Pack
from zerofx.passes.quantize_unshards import QuantizeUnshards

WIDTH = 48
FROZEN = ("layers.0.base.weight", "layers.1.base.weight")


class Lora(nn.Module):
    """A frozen layer, and a trainable product of small rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 8, bias=False)
        self.up = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(Lora(), Lora())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@contextlib.contextmanager
def packed() -> Iterator[collections.Counter[str]]:
    """How often each parameter is packed."""
    found: collections.Counter[str] = collections.Counter()
    plain = Reference.__call__

    def counting(kernel: Reference, inputs: Any, outputs: Any, seed: int = 0) -> None:
        if isinstance(kernel.spec, Pack):
            found.update(member.name for member in kernel.spec.parcels.members)
        plain(kernel, inputs, outputs, seed)

    with mock.patch.object(Reference, "__call__", counting):
        yield found


def _compiled(model: nn.Module, bucket_bytes: int, **how: Any) -> Any:
    options = {"inner": "eager", "min_shard_numel": 0, "bucket_bytes": bucket_bytes}
    how = how or {"quantize_weights": "int8x32"}
    return torch.compile(model, backend="zero3", options={**options, **how})


def _loss(run: Any, seed: int = 9) -> float:
    with torch.no_grad():
        return float(run(draw(4, WIDTH, seed=seed)))


def _train(bucket_bytes: int) -> None:
    torch.compiler.reset()
    model = Adapted()
    run = _compiled(model, bucket_bytes)
    # Frozen parameters are among those it is given, as in `AdamW(model.parameters())`.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with packed() as found:
        for number in range(3):
            run(draw(4, WIDTH, seed=number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        _loss(run)
    assert [found[name] for name in FROZEN] == [1, 1]
    assert found["layers.0.down.weight"] >= 4, "trainable ones are packed in every forward"
    fresh = Adapted()
    fresh_run = _compiled(fresh, bucket_bytes)
    _loss(fresh_run)
    for edit in (_loaded, _written, _behind):
        with packed() as found:
            edit(model)
            losses = [_loss(run) for _ in range(2)]
        assert found[FROZEN[0]] == 1 and losses[0] == losses[1]
        # What travels is what a model sends that never trained, and was given these weights.
        fresh.load_state_dict(model.state_dict())
        assert _loss(fresh_run) == losses[0]
    _thawed(model, run, optimizer)


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({name: 1.5 * v for name, v in model.state_dict().items()})


def _written(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter(FROZEN[0]).mul_(0.5)


def _behind(model: nn.Module) -> None:
    model.get_parameter(FROZEN[0]).data.to_local().mul_(3)  # type: ignore[union-attr]
    zerofx.refresh(model)


def _thawed(model: nn.Module, run: Any, optimizer: torch.optim.Optimizer) -> None:
    """A parameter that trains again is packed in every forward, and so follows its optimizer."""
    weight = model.get_parameter(FROZEN[0]).requires_grad_(True)
    before = _loss(run)
    with packed() as found:
        for _ in range(2):
            run(draw(4, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()
        after = _loss(run)
    assert found[FROZEN[0]] >= 3 and after != before and weight.requires_grad


def _both() -> None:
    for bucket_bytes in (0, 1 << 20):
        _train(bucket_bytes)


def test_frozen_weights_are_packed_once_until_they_change() -> None:
    run_ranks(2, _both, timeout=120)


def _alone() -> None:
    """What is trained travels as numbers, from the moment when it is."""
    torch.compiler.reset()
    codes = QuantizeUnshards("int8x32", frozen_only=True)
    run = _compiled(Adapted(), 1 << 20, passes=[zerofx.before("fuse_unshards", codes)])
    with packed() as found:
        losses = [_loss(run) for _ in range(2)]
    assert found == dict.fromkeys(FROZEN, 1) and losses[0] == losses[1]
    with torch.no_grad():
        exact = float(Adapted()(draw(4, WIDTH, seed=9)))
    all_coded = _loss(_compiled(Adapted(), 1 << 20))
    assert len({exact, all_coded, losses[0]}) == 3
    thawed = Adapted()
    run = _compiled(thawed, 1 << 20, passes=[zerofx.before("fuse_unshards", codes)])
    assert _loss(run) == losses[0]
    thawed.requires_grad_(True)
    with packed() as found:
        assert abs(float(run(draw(4, WIDTH, seed=9))) / exact - 1) < 1e-6
    assert not found


def test_frozen_weights_alone_are_coded() -> None:
    run_ranks(2, _alone)
