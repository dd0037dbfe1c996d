"""Every operation gives value and gradients of whole sequences, whichever way it is done."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.ranks import run_ranks
from tests.sequence.operations import CUT, LENGTH, ROWS, WHOLE, WIDTH, Function


class One(nn.Module):
    """A function with parameters of its own."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.hidden = nn.Embedding(9, WIDTH, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.function = function

    def forward(self, ids: Tensor, times: Tensor) -> Tensor:
        out = self.function(self.hidden(ids), self.weight, times)
        ramp = torch.arange(out.numel(), dtype=torch.float64).view(out.shape).cos()
        return (out * ramp).sum()


class All(nn.Module):
    def __init__(self, functions: dict[str, Function]) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = {name: name.replace(" ", "_") for name in functions}
        self.each = nn.ModuleDict({names[name]: One(functions[name]) for name in functions})

    def forward(self, ids: Tensor, times: Tensor) -> Tensor:
        return torch.stack([one(ids, times) for one in self.each.values()])


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(9, (ROWS, LENGTH), generator=generator)
    return ids, torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)


def _compare(kind: str) -> tuple[list[str], set[str]]:
    """Functions that give something else than in one process; and those that are given wholes."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("zerofx.sequence.divide").addHandler(handler)
    functions = CUT if kind == "cut" else WHOLE
    ids, times = _inputs()
    plain, net = All(functions), All(functions)
    want = plain(ids, times)
    want.sum().backward()
    options = {"inner": "eager", "sequence_parallel": 2}
    zerofx.mark_sequence(ids)
    got = torch.compile(net, backend="zero0", options=options)(ids, times)
    got.sum().backward()
    wrong = [
        name
        for name, ours, theirs in zip(plain.each, got, want, strict=True)
        if (ours - theirs).abs() > 1e-10
    ]
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None and (ours.grad.full_tensor() - theirs.grad).abs().max() > 1e-10:
            wrong.append(name)
    text = "".join(record.getMessage() for record in records)
    return wrong, {name for name in plain.each if f"each.{name}" in text}


@pytest.mark.parametrize("kind", ["cut", "whole"])
def test_operations(kind: str) -> None:
    results = run_ranks(2, _compare, kind, timeout=300)
    assert not any(wrong for wrong, _ in results)
    wholes = {name.replace(" ", "_") for name in WHOLE} if kind == "whole" else set[str]()
    assert results[0][1] == wholes
