"""Numbers of whole parameters in the loop, and their gradients: of losses, norms, running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.loops import compiled, full
from tests.ranks import run_ranks


class Rows(nn.Module):
    """Of which two ranks have equally many, not equally many, and one rank none."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("even", (4, 4)), ("odd", (5, 4)), ("one", (1, 4)), ("bias", (7,))):
            values = torch.rand(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(values))

    def forward(self) -> Tensor:
        return torch.stack([param.square().sum() for param in self.parameters()]).sum()


Reduction = Callable[[Any, Any], Any]
DISTANCES: dict[str, Reduction] = {
    "mse": F.mse_loss,
    "mse, summed": lambda new, old: F.mse_loss(new, old, reduction="sum"),
    "smooth l1": lambda new, old: F.smooth_l1_loss(new, old, beta=0.1),
    "huber": F.huber_loss,
    "soft margin": lambda new, old: F.soft_margin_loss(new, old.sign()),
    "cross entropy": lambda new, old: F.binary_cross_entropy(new.sigmoid(), old.sigmoid()),
    "of logits": lambda new, old: F.binary_cross_entropy_with_logits(new, old.sigmoid()),
}
NUMBERS: dict[str, Reduction] = {
    "norms of columns": lambda new, old: new.norm(dim=0).sum(),
    "stacked": lambda new, old: torch.stack([new.norm(dim=0), old.norm(dim=0)]).sum(),
    "their norm": lambda new, old: torch.stack([new.norm(), old[:1].norm()]).norm(),
    "their sum": lambda new, old: torch.stack([new.norm(), old[:1].norm()]).sum(),
    "running sum": lambda new, old: (new.cumsum(-1) * old).sum(),
    "running product": lambda new, old: new.detach().cumprod(-1).sum() * new.sum(),
    "greatest": lambda new, old: new.amax(),
    "in a row": lambda new, old: new.norm(torch.inf),
    "a column": lambda new, old: new.select(-1, -1).square().sum(),
    "columns in use": lambda new, old: new.sum() * (old > 0.3).any(0).sum(),
    "in use at all": lambda new, old: new.sum() * (old > 0.3).any().double(),
    "over no dimension": lambda new, old: new.sum(dim=[]) + new.mean(dim=[]),
    "place of the greatest": lambda new, old: new.sum() * new.argmax(),
    "places by row": lambda new, old: new.sum() * new.argmin(-1).sum(),
    "places by column": lambda new, old: new.sum() * new.argmax(0).sum(),
}


def _reduce(stage: int) -> None:
    model, plain = Rows(), Rows()
    compiled(model, stage)().backward()
    for what, reduce in {**DISTANCES, **NUMBERS}.items():
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            found, wanted = (reduce(new, new.detach() * 0.5 + 0.1) for new in (ours, theirs))
            place = f"{what} of {name}"
            torch.testing.assert_close(full(found), wanted.detach(), msg=place)
            (grad,) = torch.autograd.grad(found.full_tensor(), ours)
            torch.testing.assert_close(full(grad), *torch.autograd.grad(wanted, theirs), msg=place)


@pytest.mark.parametrize("stage", [1, 3])
def test_numbers_of_whole_parameters(stage: int) -> None:
    run_ranks(2, _reduce, stage)


EXTREMES: dict[str, Callable[[Any], Any]] = {
    "max": lambda value: value.max(),
    "of absolute values": lambda value: value.abs().max(),
    "amin": lambda value: value.amin(),
    "by column": lambda value: value.amax(0),
    "norm": lambda value: value.norm(torch.inf),
    "of a list": lambda value: torch._foreach_max([value])[0],
    "of all": lambda value: torch.nn.utils.get_total_norm([value, value], torch.inf),
}


def _nan() -> None:
    for row in range(3):
        model = Rows()
        compiled(model, 3)()
        values: Any = torch.rand(5, 4, dtype=torch.float64)
        values[2 * row, 1] = torch.nan
        model.odd.data = values
        for what, find in EXTREMES.items():
            ours, theirs = full(find(model.odd.detach())), find(values)
            torch.testing.assert_close(ours, theirs, equal_nan=True, msg=f"{what}, row {2 * row}")


def test_nan_of_any_rank_is_the_greatest() -> None:
    run_ranks(2, _nan)
