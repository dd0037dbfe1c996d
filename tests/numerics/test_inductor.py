"""Through Inductor, on a pairwise cover of model, stage, optimizer and clipping.

A model keeps its dtype, so that its rows share kernels; all stages, optimizers and clippings meet
both. Every sixth row runs on four ranks, the others on two: four compile four times.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.cover import Row, pairwise
from tests.numerics.runs import (
    CLIP,
    MODELS,
    MORE_TRANSFORMERS,
    STAGES,
    parity,
    zero_and_reference,
)
from tests.oracle import assert_same
from tests.ranks import run_ranks

TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-10},
    torch.float32: {"rtol": 2e-6, "params_rtol": 5e-6},
}
ROWS = pairwise(
    {"name": MODELS, "stage": STAGES, "optimizer": ("sgd", "adamw"), "clip": (None, CLIP)},
    lambda row: parity(row) == 0 and MORE_TRANSFORMERS.get(row["name"], {}).items() <= row.items(),
)


def _dtype(name: str) -> torch.dtype:
    return tuple(TOLERANCES)[MODELS.index(name) // 2 % 2]


def _describe(row: Row) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in row.values())


def _sorted_rows() -> list[Any]:
    rows = sorted(ROWS, key=lambda row: MODELS.index(row["name"]))
    numbered = [
        {**row, "dtype": _dtype(row["name"]), "ranks": 4 if index % 6 == 1 else 2}
        for index, row in enumerate(rows)
    ]
    numbered.sort(key=lambda row: row["ranks"])
    return [pytest.param(row, id=_describe(row)) for row in numbered]


@pytest.mark.parametrize("row", _sorted_rows())
def test_ranks_agree_with_ddp(row: Row) -> None:
    setting = (row["optimizer"], row["clip"])
    job = (zero_and_reference, row["name"], row["stage"], setting, "ddp", row["dtype"])
    got, want = zip(*run_ranks(row["ranks"], *job, timeout=220), strict=True)
    assert_same(got, want, **TOLERANCES[row["dtype"]])
