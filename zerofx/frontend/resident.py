"""What lives on a rank from step to step, and what the optimizer does with it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from zerofx.config import ZeroConfig
from zerofx.cost.forecast import Resident
from zerofx.cost.machine import Machine
from zerofx.cost.memory import Precision, state_itemsize, states
from zerofx.cost.micro_batches import is_hybrid
from zerofx.frontend.layouts import lay_out
from zerofx.frontend.weigh import CODING
from zerofx.ir.spec import ParamSpec
from zerofx.passes.pipelines import pipeline
from zerofx.passes.quantize_unshards import QuantizeUnshards


def rest_of(
    params: Iterable[ParamSpec],
    config: ZeroConfig,
    num_ranks: int,
    *,
    precision: Precision,
    buffers: int,
    device: str,
    coded: Collection[str],
    accumulates: bool,
) -> tuple[list[ParamSpec], Resident]:
    """The parameters as `config` lays them out, and what lives all the time on the fullest rank.

    The optimizer is `torch.optim.AdamW`.

    Args:
        params: of the model.
        config: stage and options.
        num_ranks: W.
        precision: of parameters and optimizer.
        buffers: bytes of the model's buffers.
        device: `cuda` or `cpu`.
        coded: names of the passes whose codes travel (`zerofx.frontend.weigh`).
        accumulates: gradients of other graphs or micro-batches are there when one of them runs.
    """
    laid = lay_out(params, config, num_ranks, codes_are_kept=QuantizeUnshards.name in coded)
    trainable = [spec for spec in laid if spec.trainable]
    # Its step makes one temporary of all parameters on GPUs, and two of one on CPUs.
    made = [s.shard_shape(0).numel() * state_itemsize(s, precision) for s in trainable]
    step = 2 * max(made, default=0) if device == "cpu" else sum(made)
    step += sum(map(_widening, trainable))
    held = states(laid, precision)
    standing = int(held.grads) + _held_back(laid, config) if accumulates else 0
    return laid, Resident(held, buffers, step, standing, _kept_codes(laid, config, coded))


def _held_back(laid: Iterable[ParamSpec], config: ZeroConfig) -> int:
    """Bytes of the sums that wait beside `.grad` for the last of `accumulate` backwards.

    They are full gradients at stages 0 and 1, and means that replicas have not shared yet on a
    hybrid mesh.
    """
    total = 0
    for spec in laid if config.accumulate > 1 else ():
        layout = spec.layout
        size = spec.shape if config.stage < 2 else spec.shard_shape(0)
        if spec.trainable and (config.stage < 2 or is_hybrid(config)):
            total += math.prod(size) * (layout.reduce_dtype or spec.full_dtype).itemsize
    return total


def _widening(spec: ParamSpec) -> int:
    """Bytes that an optimizer step takes for a gradient in its parameter's dtype.

    A resident copy apart from the shard makes room for it.
    """
    if spec.grad_dtype is spec.dtype:
        return 0
    freed = spec.full_bytes if spec.layout.resident and spec.cast is not None else 0
    return spec.shard_shape(0).numel() * (spec.dtype.itemsize - spec.grad_dtype.itemsize) - freed


def _kept_codes(laid: Iterable[ParamSpec], config: ZeroConfig, coded: Collection[str]) -> int:
    """Bytes of errors and codes that `config` keeps from step to step, on the rank with most."""
    coding = [each for each in pipeline(config) if isinstance(each, CODING)]
    sent = [each for each in coding if each.name in coded]
    return sum(each.kept_bytes(spec) for each in sent for spec in laid)


def update_seconds(laid: Sequence[ParamSpec], resident: Resident, machine: Machine) -> float:
    """Time of the optimizer's step: it reads values, gradients and state, and writes two."""
    trained = [spec for spec in laid if spec.trainable]
    shards = sum(spec.shard_shape(0).numel() * spec.dtype.itemsize for spec in trained)
    moved = 2 * (shards + resident.states.optimizer) + resident.states.grads
    rate = machine.host.update_rate or machine.roofline.bytes_per_second
    return machine.host.update * len(trained) + moved / rate
