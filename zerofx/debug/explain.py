"""`zerofx.explain`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx.cli.units import rate
from zerofx.config import ZeroConfig
from zerofx.cost.link import Link
from zerofx.cost.machine import DATACENTER_GPU, Machine
from zerofx.debug.explanation import Explanation, explain_model
from zerofx.debug.outcome import Setting
from zerofx.errors import ConfigError
from zerofx.frontend.choose import refuse_shared_sequences
from zerofx.passes.registry import with_registered
from zerofx.torch_private import unwrap_compiled


def explain(
    model: nn.Module,
    *inputs: Any,
    named: Mapping[str, Any] | None = None,
    config: ZeroConfig | None = None,
    world_size: int | None = None,
    machine: Machine = DATACENTER_GPU,
    link: Link | str | None = None,
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
        world_size: number of ranks; by default those of the mesh in `config`, else of the process
            group, or 8 without one.
        machine: where it would train.
        link: in place of the machine's; or its rate alone, as `"100Gbit/s"` or `"25GB/s"`.
        memory_bytes: that a rank may use; then changes that do not fit are not proposed.

    Returns:
        Graphs, breaks, predicted step and memory, collectives, and the changes that would help.

    Raises:
        ConfigError: an argument has another type than it says, or there are no ranks.
        UnsupportedError: the model is sharded already, nothing of it trains, or the inputs do not
            fit its forward.
    """
    _check("model", model, nn.Module)
    _check("config", config, (ZeroConfig, NoneType))
    config = with_registered(config or ZeroConfig())
    if world_size is None:
        world_size = _num_ranks(config)
    _check("world_size", world_size, int)
    _check("machine", machine, Machine)
    _check("memory_bytes", memory_bytes, (int, NoneType))
    if world_size < 1:
        raise ConfigError(f"explain: world_size={world_size} is not allowed", "use at least 1")
    if link is not None:
        machine = machine.with_link(_link(link, machine.link))
    refuse_shared_sequences(config, "explain", "leave it out, or explain a script that asks for it")
    setting = Setting(config, world_size, machine, memory_bytes)
    with torch.inference_mode(False), torch.enable_grad():  # as it trains, whoever asks
        return explain_model(unwrap_compiled(model), inputs, dict(named or {}), setting)


def _num_ranks(config: ZeroConfig) -> int:
    if config.mesh is not None:
        return config.mesh.size()
    return dist.get_world_size() if dist.is_initialized() else 8


def _link(said: Any, otherwise: Link) -> Link:
    _check("link", said, (Link, str))
    if isinstance(said, Link):
        return said
    try:
        return dataclasses.replace(otherwise, bytes_per_second=rate(said))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"explain: link: {error}", "write it so, or give a Link") from error


def _check(name: str, value: Any, wanted: type | tuple[type, ...]) -> None:
    if isinstance(value, wanted) and not isinstance(value, bool):
        return
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    known = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
    raise ConfigError(
        f"explain: {name} is {value!r}, of type {type(value).__name__}", f"give a {known}"
    )
