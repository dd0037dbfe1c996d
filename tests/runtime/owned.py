"""Optimizers with owners beside the same ones of a single process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

from tests.contract.loops import FAST, close, full
from tests.models import Mlp, batch
from tests.ranks import run_ranks
from zerofx import OwnerOptimizer


class Shampoo(Optimizer):
    """A preconditioner for each dimension; its inverse root is taken at every step."""

    def __init__(self, params: Any, lr: float = 0.1, eps: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, update = self.state[param], param.grad
                state["step"] = state.get("step", 0) + 1
                for dim, size in enumerate(param.shape):
                    rows = param.grad.movedim(dim, 0).reshape(size, -1)
                    known = state.setdefault(f"outer{dim}", group["eps"] * torch.eye(size))
                    known += rows @ rows.T
                    values, vectors = torch.linalg.eigh(known)
                    root = vectors @ torch.diag(values ** (-0.5 / param.ndim)) @ vectors.T
                    turned = update.movedim(dim, 0)
                    update = (root @ turned.reshape(size, -1)).view(turned.shape).movedim(0, dim)
                param.add_(update, alpha=-group["lr"])


class Counting(Optimizer):
    """Momentum that is corrected for its start by a count of steps."""

    def __init__(self, params: Any, lr: float = 0.1, where: str = "group") -> None:
        super().__init__(params, {"lr": lr})
        self.where, self.number, self.tensor = where, 0, torch.zeros(())
        self.held: dict[str, list[int]] = {"its list": [0]}

    def _count(self, group: dict[str, Any]) -> int:
        """One more than in the last step, if it is kept until then."""
        if self.where == "itself":
            self.number += 1
            return self.number
        if self.where in ("its list", "list in group"):
            held = (
                group.setdefault("count", [0]) if "group" in self.where else self.held[self.where]
            )
            held[0] += 1
            return held[0]
        if self.where == "its tensor":
            return int(self.tensor.add_(1))
        if self.where == "state":  # as MADGRAD does
            return int(self.state.setdefault("k", torch.zeros(())).add_(1))  # pyright: ignore
        if self.where == "state of its tensor":
            return int(self.state[self.tensor].setdefault("k", torch.zeros(())).add_(1))
        if self.where == "tensor in group":
            return int(group.setdefault("count", torch.zeros(())).add_(1))
        if self.where == "norms":  # as Prodigy and D-Adaptation do
            group["norm"] = sum(p.grad.norm().item() for p in group["params"])
        group["count"] = group.get("count", 0) + 1
        return group["count"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            count = self._count(group)
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.1)
                param.sub_(mean / (1 - 0.9**count), alpha=group["lr"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim == 2]


KINDS: dict[str, tuple[Callable[..., Optimizer], Callable[[nn.Module], list[nn.Parameter]]]] = {
    "muon": (partial(Muon, lr=0.05), matrices),
    "adafactor": (partial(Adafactor, lr=0.05), lambda model: list(model.parameters())),
    "shampoo": (Shampoo, lambda model: list(model.parameters())),
    **{
        f"counting in {where}": (partial(Counting, where=where), lambda m: list(m.parameters()))
        for where in ("group", "tensor in group", "list in group", "state")
    },
}
STEPS = 4


def make_model() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


def alone(kind: str, num_ranks: int, steps: int = STEPS) -> Mlp:
    """One process over the batches of all ranks."""
    model = make_model()
    make, chosen = KINDS[kind]
    optimizer = make(chosen(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number in range(steps):
        for rank in range(num_ranks):
            (model(*batch("mlp", rank, number, rows=4)) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def trained(kind: str, stage: int, steps: int = STEPS, **options: Any) -> tuple[Any, Any]:
    model = make_model()
    make, chosen = KINDS[kind]
    optimizer = OwnerOptimizer(chosen(model), make)  # before the model is sharded
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch._dynamo.reset()
    run = torch.compile(model, backend=f"zero{stage}", options={**FAST, **options})
    for number in range(steps):
        run(*batch("mlp", dist.get_rank(), number, rows=4)).backward()
        for param in chosen(model) if number == 1 else ():
            assert param.grad is not None
            param.grad = full(param.grad)  # as a loop may make it itself, whole
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer


def values(kind: str, stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model, _ = trained(kind, stage, **options)
    return {name: full(param) for name, param in model.named_parameters()}


def compare(num_ranks: int, kind: str, stage: int, **options: Any) -> None:
    wanted = alone(kind, num_ranks)
    for found in run_ranks(num_ranks, values, kind, stage, options):
        for name, value in found.items():
            close(value, wanted.get_parameter(name).detach(), f"{kind} {stage} {name}", 1e-5)
