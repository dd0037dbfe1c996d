"""Sharded checkpoints with `torch.distributed.checkpoint`: each rank writes only what it holds.

Nothing is gathered, and a checkpoint of four ranks loads on two. Beside the shards lies
`progress.json`: the step, the position in the data and the losses so far.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from kit.world import World


@dataclass
class Progress:
    """How far training has come."""

    step: int = 0
    position: int = 0
    losses: list[float] = field(default_factory=list)


def save(
    folder: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
) -> Path:
    """Write a checkpoint of this step below `folder`; all ranks call it together."""
    target = folder / f"step-{progress.step:06d}"
    partial = folder / f".{target.name}"
    if world.leads:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(model, optimizer) | _random_state(world), checkpoint_id=partial)
    if world.leads:
        record = asdict(progress) | {"world_size": world.size, "device": world.device.type}
        (partial / "progress.json").write_text(json.dumps(record))
        # A run that is killed while writing leaves a hidden folder, never half a checkpoint.
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    dist.barrier()
    return target


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint below `folder`."""
    return max(folder.glob("step-*"), default=None)


def load(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> Progress:
    """Read a checkpoint into a model and an optimizer, however they are sharded now."""
    record = json.loads((checkpoint / "progress.json").read_text())
    ranks = record.pop("world_size"), record.pop("device", world.device.type)
    state = _state(model, optimizer)
    # Random streams belong to ranks and devices: with others there is nothing to restore.
    streams = _random_state(world) if ranks == (world.size, world.device.type) else {}
    state |= streams
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    if streams:
        cpu, *cuda = streams[f"random.{world.rank}"]
        torch.set_rng_state(cpu)
        for stream in cuda:
            torch.cuda.set_rng_state(stream, world.device)
    return Progress(**record)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _random_state(world: World) -> dict[str, Sequence[torch.Tensor]]:
    streams = [torch.get_rng_state()]
    if world.device.type == "cuda":
        streams.append(torch.cuda.get_rng_state(world.device))
    return {f"random.{world.rank}": streams}
