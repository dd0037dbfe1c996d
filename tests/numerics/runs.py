"""Jobs for ranks: many trainings in one, since compiling costs more than training.

A setting is `(optimizer, clip)`. One compiled model serves all settings of its stage: its initial
values are put back through `zerofx.unshard` in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.hard.markers import markers_raise
from tests.models import ZOO, Batch, batch, make
from tests.oracle import Result, build_optimizer, fit, train

MODELS = (
    "mlp",
    "gpt",
    "encoder",
    "encoder_decoder",
    "cnn",
    "lstm",
    "moe",
    "frozen",
    "gpt_checkpointed",
)
STAGES = (0, 1, 2, 3)
CLIP = 0.1
"""Below the norm of every model's gradients, so that it does something."""
MORE_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "encoder": {"stage": 2, "optimizer": "sgd", "clip": None},
    "encoder_decoder": {"stage": 3, "optimizer": "adamw", "clip": CLIP},
    "gpt_checkpointed": {"stage": 0, "optimizer": "sgd", "clip": CLIP},
}
"""They cost most, and `gpt` has their kinds of weights: one row each does in covers."""

Setting = tuple[str, float | None]
SETTINGS: tuple[Setting, ...] = (
    ("sgd", None),
    ("sgd", CLIP),
    ("adamw", None),
    ("adamw", CLIP),
)


def references(name: str, how: str, settings: Sequence[Setting], **kwargs: Any) -> list[Result]:
    """What `how` computes for every setting."""
    return [train(name, how, optimizer=opt, clip=clip, **kwargs) for opt, clip in settings]


def zero(
    name: str,
    stage: int,
    settings: Sequence[Setting],
    dtype: torch.dtype = torch.float32,
    steps: int = 5,
    **options: Any,
) -> list[Result]:
    """What `zero{stage}` computes for every setting, with one compilation.

    No marker is called, but where Dynamo skips a frame, which reads parameters op by op.
    """
    model, rank = make(name, dtype), dist.get_rank()
    options = {"min_shard_numel": 0, **options}
    if ZOO[name].explicit:
        zerofx.shard(model, zerofx.ZeroConfig(stage=stage, **options))  # pyright: ignore
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    fresh = make(name, dtype)

    def inputs(number: int) -> Mapping[int, Batch]:
        return {rank: batch(name, rank, number, dtype)}

    results = []
    for position, (optimizer, clip) in enumerate(settings):
        if position:
            _reset(model, fresh)
        opt = build_optimizer(optimizer, model.parameters())
        with nullcontext() if ZOO[name].explicit else markers_raise():
            results.append(fit(model, run, opt, inputs, steps=steps, clip=clip))
    return results


def zero_and_reference(
    name: str, stage: int, setting: Setting, how: str, dtype: torch.dtype, **options: Any
) -> tuple[Result, Result]:
    """One training by `zero{stage}` and by `how`."""
    (got,) = zero(name, stage, [setting], dtype, **options)
    (want,) = references(name, how, [setting], dtype=dtype)
    return got, want


def _reset(model: nn.Module, fresh: nn.Module) -> None:
    with zerofx.unshard(model) as values, torch.no_grad():
        for key, value in fresh.named_parameters():
            values[key].copy_(value)
    for key, buffer in model.named_buffers():
        buffer.copy_(fresh.get_buffer(key))


def parity(row: Mapping[str, Any]) -> int:
    """Halves the pairs of model and stage, which two ranks cover bitwise and in full."""
    return (row["stage"] + MODELS.index(row["name"])) % 2
