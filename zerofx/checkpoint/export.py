"""Full weights in the layout of Hugging Face, one tensor at a time."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from zerofx.checkpoint.ranks import Ranks, ranks_that_hold
from zerofx.checkpoint.writer import begin, sync
from zerofx.errors import CheckpointError
from zerofx.sharding.paths import local_path
from zerofx.sharding.weights import INDEX, SINGLE, plain_name
from zerofx.torch_private import backend_of, storage_key, unwrap_compiled

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def export_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> None:
    """Write full weights as `from_pretrained` reads them; every rank calls it, the first writes.

    A new folder appears when it is complete. One that is there keeps its other files: an earlier
    export in it is replaced file by file, once all are written, and cannot be read meanwhile.
    Values are gathered tensor by tensor: the first rank holds at most the tensors of one file at a
    time, other ranks nothing but their shards.

    Args:
        model: plain or sharded; a `config` that can `save_pretrained` (transformers') goes along,
            with the model's class and the dtype of the files in it. Tied weights are written once,
            under their first name.
        folder: on the first rank's host, which creates it.
        max_shard_bytes: most bytes of tensors in a file, unless one tensor alone has more.
        dtype: of floating-point values in the files; by default that of the model. A shard is cast
            before it is sent.

    Raises:
        CheckpointError: other ranks have saved another model there, it is a file, or the first rank
            cannot write.
    """
    ranks, values = ranks_that_hold(model, "export_safetensors"), once(model)

    def collect(names: Collection[str]) -> dict[str, Tensor]:
        return _collect({name: cast_floats(values[name], dtype) for name in names}, ranks)

    write_files(model, folder, values, collect, ranks, max_shard_bytes, dtype)


def write_files(
    model: nn.Module,
    folder: str | os.PathLike[str],
    values: Mapping[str, Tensor],
    collect: Callable[[Collection[str]], dict[str, Tensor]],
    ranks: Ranks,
    most: int,
    dtype: torch.dtype | None,
) -> None:
    """Write what `collect` brings to the first rank, file by file, and publish the folder.

    Args:
        model: as in `export_safetensors`, as are `folder` and `dtype`.
        values: what there is, by name, with the shapes of full values.
        collect: full values of some names on the first rank, on its host; all ranks call it.
        ranks: that come here together.
        most: bytes in a file, unless one tensor alone has more.
    """
    ranks.claim(folder)
    files = split(values, most, dtype)
    partial = ranks.agreed(lambda: begin(folder_of(folder)))
    for file, names in files.items():
        content = collect(names)
        path = partial / file
        ranks.agreed(functools.partial(save_file, content, path, metadata={"format": "pt"}))
        del content

    def finish() -> None:
        write_index(partial, files, values, dtype)
        floats = (each.dtype for each in values.values() if each.is_floating_point())
        _write_config(partial, unwrap_compiled(model), dtype or next(floats, None))
        put_weights(partial, folder_of(folder))

    ranks.agreed(finish)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Where weights of that path are written to.

    Raises:
        CheckpointError: it is a file, or a URL.
    """
    folder = local_path(path).resolve()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file", "export to a folder")
    return folder


def put_weights(partial: Path, folder: Path) -> None:
    """Give a complete folder its name, or put its files among those that are there.

    Args:
        partial: the folder.
        folder: its name. A kill leaves old weights or new ones there, or none that are complete,
            but never a mixture that can be read.
    """
    for each in (*partial.iterdir(), partial):
        sync(each)
    if not folder.exists():
        partial.rename(folder)
        sync(folder.parent)
        return
    written = {file.name for file in partial.iterdir()}
    if INDEX in written:  # which old files and new ones share names
        (folder / INDEX).unlink(missing_ok=True)
    for name in sorted(written, key=lambda name: (name == INDEX, name)):
        (partial / name).replace(folder / name)
    old = {file.name for file in folder.iterdir() if _WEIGHTS.fullmatch(file.name)} - written
    for name in sorted(old, key=lambda name: name != INDEX):
        (folder / name).unlink()
    partial.rmdir()
    sync(folder)


def full_state_dict(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Full values of parameters and persistent buffers; every rank calls it.

    Args:
        model: plain or sharded, compiled or not.
        names: of the values wanted, tied ones under each: `load_state_dict` asks for those of
            `model.state_dict()`. By default all, tied ones once, under their first name.

    Returns:
        On the first rank that holds the model, mostly rank 0, the values by name, on its host; on
        other ranks nothing.
    """
    values = once(model) if names is None else _tensors(model)
    chosen = {key: values[key] for key in values if names is None or key in names}
    return _collect(chosen, ranks_that_hold(model, "full_state_dict"), copy=True)


def _collect(values: dict[str, Tensor], ranks: Ranks, *, copy: bool = False) -> dict[str, Tensor]:
    """Full values on the first rank's host, one after the other; other ranks get none.

    Without `copy` what was full there already is not copied, if it shares no memory with others:
    files of safetensors hold no such values.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in values.items():
        full = _on_first_rank(value, ranks)
        if full is not None and ranks.is_first:
            full = full.to("cpu", copy=copy or storage_key(full) in seen)
            seen.add(storage_key(full))
            found[name] = full
        del full
    return found


def once(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict, tied ones under their first name only."""
    values = _tensors(model)
    # Some names of a buffer may be no persistent ones.
    named = [(plain_name(name), value) for name, value in _named(unwrap_compiled(model))]
    named = [(name, value) for name, value in named if name in values]
    first = {id(value): name for name, value in reversed(named)}
    again = {name for name, value in named if first[id(value)] != name}
    return {name: value for name, value in values.items() if name not in again}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = get_model_state_dict(model)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def split(
    values: Mapping[str, Tensor], most: int, dtype: torch.dtype | None
) -> dict[str, list[str]]:
    """Names by file, in order; a file holds at most `most` bytes in `dtype`, or one tensor."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, value in values.items():
        size = _num_bytes(value, dtype)
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def _num_bytes(value: Tensor, dtype: torch.dtype | None) -> int:
    return value.numel() * cast_floats(torch.empty(0, dtype=value.dtype), dtype).element_size()


def cast_floats(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`value` in `dtype`, if it has floating-point numbers and a dtype is asked for."""
    value = value.detach()
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _on_first_rank(value: Tensor, ranks: Ranks) -> Tensor | None:
    """The full value, on the first rank; others send what they hold, and allocate nothing."""
    if not isinstance(value, DTensor):
        return value.contiguous()
    *outer, last = value.placements
    if not all(each.is_replicate() for each in outer) or last not in (Shard(0), Replicate()):
        return value.full_tensor().contiguous()  # not of zerofx
    local = value.to_local().contiguous()
    if last.is_replicate():
        return local
    group = value.device_mesh.get_group(value.device_mesh.ndim - 1)
    if backend_of(group, local.device) == "gloo":
        local = local.cpu()  # its messages need host memory
    return _collected(local, value.shape, group, ranks.numbers[0])


def _collected(
    rows: Tensor, shape: torch.Size, group: dist.ProcessGroup, first: int
) -> Tensor | None:
    ranks = dist.get_process_group_ranks(group)
    if ranks[0] != first:
        return None  # a replica of the group that holds the first rank
    if dist.get_rank() != first:
        if rows.numel():
            dist.send(rows, first, group=group)
        return None
    full = rows.new_empty(shape)
    for peer, part in zip(ranks, full.chunk(len(ranks)), strict=False):
        if peer == first:
            part.copy_(rows)
        else:
            dist.recv(part, peer, group=group)
    return full


def write_index(
    folder: Path,
    files: dict[str, list[str]],
    values: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> None:
    """Say which of several files holds which tensor."""
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        num_bytes = sum(_num_bytes(value, dtype) for value in values.values())
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(folder: Path, model: nn.Module, dtype: torch.dtype | None) -> None:
    """Of the class and in the dtype of what is written, which the model's own may not say."""
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "save_pretrained"):
            written = copy.deepcopy(config)
            if hasattr(written, "architectures"):
                written.architectures, written.dtype = [type(model).__name__], dtype
            written.save_pretrained(folder)
