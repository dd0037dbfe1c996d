"""`zerofx.explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from zerofx.config import ZeroConfig
from zerofx.cost.link import Link
from zerofx.debug.explanation import Explanation, explain_model
from zerofx.debug.outcome import Setting
from zerofx.frontend.planner import DATACENTER_GPU, Machine
from zerofx.torch_private import unwrap_compiled


def explain(
    model: nn.Module,
    *inputs: Any,
    named: Mapping[str, Any] | None = None,
    config: ZeroConfig | None = None,
    world_size: int | None = None,
    machine: Machine = DATACENTER_GPU,
    link: Link | None = None,
    memory_bytes: int | None = None,
) -> Explanation:
    """What zerofx makes of a model: print it, or ask `.why("unshard.layers.3")`.

    Rehearsed on fake tensors in this process: no ranks, no device and no memory are needed, and the
    model is neither run nor changed. `zerofx explain script.py` explains a whole training loop.

    Args:
        model: plain, not sharded yet.
        inputs: of its forward; only shapes and dtypes count.
        named: inputs by name.
        config: stage and options; stage 3 by default.
        world_size: number of ranks; by default that of the process group, or 8 without one.
        machine: where it would train.
        link: in place of the machine's.
        memory_bytes: that a rank may use; then changes that do not fit are not proposed.

    Returns:
        Graphs, breaks, predicted step and memory, collectives, and the changes that would help.

    Raises:
        UnsupportedError: the model is sharded already, or nothing of it trains.
    """
    if link is not None:
        machine = dataclasses.replace(machine, link=link)
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else 8
    setting = Setting(config or ZeroConfig(), world_size, machine, memory_bytes)
    return explain_model(unwrap_compiled(model), inputs, dict(named or {}), setting)
