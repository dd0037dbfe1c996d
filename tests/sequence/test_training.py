"""Models train as one process on whole sequences, whichever ranks share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.ranks import run_ranks
from tests.sequence.models import VOCABULARY, Gpt, batch
from zerofx.errors import DivergedError
from zerofx.sequence.marks import refuse_other_samples

INDUCTOR_DIFFERENTIATES = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 fails at the gradient of attention in fp64"
)


def _steps(
    run: Any, model: nn.Module, data: int, groups: int, lengths: Sequence[int]
) -> list[float]:
    """Losses of a group's rows."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    for step, length in enumerate(lengths):
        ids, labels = (each.chunk(groups)[data].clone() for each in batch(step, length))
        zerofx.mark_sequence(ids)
        loss, _ = run(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _alone(model: nn.Module, groups: int, lengths: Sequence[int]) -> list[list[float]]:
    """Losses of each group's rows in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses: list[list[float]] = [[] for _ in range(groups)]
    for step, length in enumerate(lengths):
        rows = zip(*(each.chunk(groups) for each in batch(step, length)), strict=True)
        each = [model(*row)[0] for row in rows]
        (sum(each) / groups).backward()
        optimizer.step()
        optimizer.zero_grad()
        for mine, loss in zip(losses, each, strict=True):
            mine.append(loss.item())
    return losses


def _lengths(kind: dict[str, Any]) -> tuple[int, ...]:
    """Each length has programs of its own, so one kind of model shows it."""
    return (8, 8, 16) if "checkpoints" in kind else (8, 8)


def _trained(
    size: int, stage: int, inner: str, kind: dict[str, Any]
) -> tuple[list[float], tuple[int, ...], dict[str, Tensor]]:
    model, groups = Gpt(**kind), dist.get_world_size() // size
    data = dist.get_rank() // size
    options = {"inner": inner, "min_shard_numel": 0, "sequence_parallel": size}
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    losses = _steps(run, model, data, groups, _lengths(kind))
    ids, labels = batch(9)
    zerofx.mark_sequence(ids)
    with torch.set_grad_enabled(inner == "inductor"):  # whose third program would take long
        loss, logits = run(ids, labels)  # the whole loss, a part of the logits
    losses.append(loss.item())
    whole = zerofx.gather_sequence(logits)
    with zerofx.unshard(model) as values:
        found = {name: value.clone() for name, value in values.items()}
    return losses, tuple(logits.shape), {**found, "logits": whole}


@pytest.mark.parametrize(
    ("ranks", "size", "stage", "inner", "kind"),
    [
        (4, 2, 3, "eager", {}),
        (4, 4, 2, "eager", {"rotary": True}),
        pytest.param(2, 2, 1, "inductor", {}, marks=INDUCTOR_DIFFERENTIATES),
        (2, 2, 0, "eager", {"rotary": True, "checkpoints": True, "depth": 2}),
    ],
)
def test_trains_as_one_process(
    ranks: int, size: int, stage: int, inner: str, kind: dict[str, Any]
) -> None:
    model, groups = Gpt(**kind), ranks // size
    want = _alone(model, groups, _lengths(kind))
    end, logits = model(*batch(9))
    for rank, (losses, shape, values) in enumerate(
        run_ranks(ranks, _trained, size, stage, inner, kind, timeout=150)
    ):
        assert losses == pytest.approx([*want[rank // size], end.item()], rel=1e-10)
        assert shape == (4, 8 // size, VOCABULARY)
        for name, param in [*model.named_parameters(), ("logits", logits)]:
            torch.testing.assert_close(values[name], param.detach(), rtol=1e-10, atol=1e-10)


def _compared(batch: int) -> str:
    rows = torch.arange(6).view(2, 3)[:batch]
    group = dist.group.WORLD
    assert group is not None
    refuse_other_samples([rows[:, 0], rows], group)
    try:
        refuse_other_samples([rows[:, 0] + dist.get_rank()], group)
    except DivergedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("batch", [1, 2])
def test_columns_of_a_batch_are_compared(batch: int) -> None:
    """One label per sample, whose memory has gaps, of one sample too."""
    assert all("different ones" in each for each in run_ranks(2, _compared, batch))
