"""What lives on a rank from step to step, and what the optimizer does with it."""

from __future__ import annotations

from collections.abc import Sequence

from zerofx.config import ZeroConfig
from zerofx.cost.forecast import Resident
from zerofx.cost.machine import Machine
from zerofx.cost.memory import Precision, states
from zerofx.frontend.weigh import CODING, Weighing, pays
from zerofx.ir.spec import ParamSpec
from zerofx.passes.pipelines import pipeline


def resident_of(
    laid: Sequence[ParamSpec],
    precision: Precision,
    buffers: int,
    device: str,
    *,
    accumulates: bool = False,
) -> Resident:
    """What lives all the time on the rank that holds most, with `torch.optim.AdamW`.

    Args:
        laid: the parameters with the layouts of a stage.
        precision: of parameters and optimizer.
        buffers: bytes of the model's buffers.
        device: `cuda` or `cpu`.
        accumulates: gradients of other graphs or micro-batches are there when one of them runs.
    """
    fp32 = [4 * spec.shard_shape(0).numel() for spec in laid if spec.trainable]
    # Its step makes one temporary of all parameters on GPUs, and two of one on CPUs.
    step = 2 * max(fp32, default=0) if device == "cpu" else sum(fp32)
    step += sum(_widening(spec) for spec in laid if spec.trainable)
    held = states(laid, precision)
    return Resident(held, buffers, step, standing=int(held.grads) if accumulates else 0)


def _widening(spec: ParamSpec) -> int:
    """Bytes that an optimizer step takes for a gradient in its parameter's dtype.

    A resident copy apart from the shard makes room for it.
    """
    if spec.grad_dtype is spec.dtype:
        return 0
    freed = spec.full_bytes if spec.layout.resident and spec.cast is not None else 0
    return spec.shard_shape(0).numel() * (spec.dtype.itemsize - spec.grad_dtype.itemsize) - freed


def kept_codes(laid: Sequence[ParamSpec], config: ZeroConfig, weighed: Weighing) -> int:
    """Bytes of errors and codes that `config` keeps from step to step, on the rank with most."""
    coding = [each for each in pipeline(config, 0) if isinstance(each, CODING)]
    sent = [each for each in coding if pays(weighed, each.name)]
    return sum(each.kept_bytes(spec) for each in sent for spec in laid)


def update_seconds(laid: Sequence[ParamSpec], resident: Resident, machine: Machine) -> float:
    """Time of the optimizer's step: it reads values, gradients and state, and writes two."""
    trained = [spec for spec in laid if spec.trainable]
    shards = sum(spec.shard_shape(0).numel() * spec.dtype.itemsize for spec in trained)
    moved = 2 * (shards + resident.states.optimizer) + resident.states.grads
    rate = machine.host.update_rate or machine.roofline.bytes_per_second
    return machine.host.update * len(trained) + moved / rate
