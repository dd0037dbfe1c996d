"""Full weights of a model in parts, in the layout of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.checkpoint.export import cast_floats, full_state_dict, once, write_files
from zerofx.checkpoint.ranks import all_ranks
from zerofx.integrations.tensor_parallel.division import cut_of
from zerofx.integrations.tensor_parallel.linear import Cut
from zerofx.integrations.tensor_parallel.parts import TensorParallel
from zerofx.torch_private import unwrap_compiled


def export_joined(
    model: nn.Module,
    folder: str | os.PathLike[str],
    parts: TensorParallel,
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> None:
    """As `export_safetensors`, of the whole that the parts make up; all ranks call it.

    Raises:
        CheckpointError: the first rank cannot write.
    """
    cuts = {name: cut_of(param) for name, param in _params(model)}
    sizes = {name: _whole(value, cuts.get(name), parts.size) for name, value in once(model).items()}

    def collect(names: Collection[str]) -> dict[str, Tensor]:
        found = joined_state_dict(model, parts, names)
        return {name: cast_floats(value, dtype) for name, value in found.items()}

    write_files(model, folder, sizes, collect, all_ranks(), max_shard_bytes, dtype)


def joined_state_dict(
    model: nn.Module, parts: TensorParallel, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """As `full_state_dict`, of the whole that the parts make up; all ranks call it.

    Returns:
        On rank 0 the values by name, on its host; on other ranks nothing.
    """
    cuts = {name: cut_of(param) for name, param in _params(model)}
    # The ranks that hold the first rows of each part share a model: they are rank 0's group.
    sharded = any(isinstance(param, DTensor) for _, param in _params(model))
    mine = full_state_dict(model, names) if sharded else _own(model, names)
    found = {name: _joined(value, cuts.get(name), parts) for name, value in mine.items()}
    return found if dist.get_rank() == 0 else {}


def _own(model: nn.Module, names: Collection[str] | None) -> dict[str, Tensor]:
    """Values of a model that is not sharded yet: every rank holds its part."""
    chosen = {name: value for name, value in once(model).items() if names is None or name in names}
    return {name: value.detach().to("cpu", copy=True) for name, value in chosen.items()}


def _params(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(unwrap_compiled(model).named_parameters())


def _whole(value: Tensor, cut: Cut | None, size: int) -> Tensor:
    """Nothing but the shape and the dtype of the whole."""
    shape = list(value.shape)
    if cut is not None:
        shape[cut.dim] *= size
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _joined(value: Tensor, cut: Cut | None, parts: TensorParallel) -> Tensor:
    """On the first rank of all; others send what they hold."""
    if cut is None:
        return value
    device = torch.device(parts.mesh.device_type)
    held = value.to(device).contiguous()
    received = [torch.empty_like(held) for _ in range(parts.size)] if parts.part == 0 else None
    dist.gather(held, received, group=parts.group, group_dst=0)
    return value if received is None else cut.join([each.to("cpu") for each in received])
