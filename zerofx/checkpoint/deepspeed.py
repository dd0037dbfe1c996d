"""Checkpoints that DeepSpeed ZeRO wrote (0.8 and later), at stages 1, 2 and 3; it is not needed.

DeepSpeed keeps the master weights and the optimizer's state as flat partitions, a file a rank. At
stages 1 and 2 a partition is a stretch of all parameters of a group end to end, and
`param_slice_mappings` says which fragment lies where. At stage 3 every parameter is split into
equal parts, the last one padded, and a rank's parts lie end to end in the order of `param_shapes`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zerofx.checkpoint.source import Source, Stored, meta
from zerofx.errors import CheckpointError

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")
_MODEL = "mp_rank_00_model_states.pt"
_MASTER = "master"
# What DeepSpeed adds to a client's state and a training loop has no use for.
_INTERNAL = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "ds_config"),
    *("shared_params", "frozen_param_fragments", "checkpoint_parallel_dimensions", "ds_version"),
    *("dp_world_size", "mp_world_size", "data_sampler", "random_ltd"),
}


@dataclasses.dataclass(frozen=True)
class _Fragment:
    """Elements `[start, start + numel)` of the partition of `group` on `rank`."""

    rank: int
    group: int
    start: int
    numel: int


def is_checkpoint(path: Path) -> bool:
    """Whether `path` looks like a folder that DeepSpeed saved into, or one of its tags."""
    return path.is_dir() and any(_files(_tag(path), "optim"))


def refuse_without_tag(path: Path) -> None:
    """Say what is missing in a folder that DeepSpeed saved into, and that is no checkpoint.

    Raises:
        CheckpointError: it is such a folder; names the checkpoints in it.
    """
    tags = sorted(each.name for each in path.iterdir() if any(_files(each, "optim")))
    remedy = (
        "name the folder of a checkpoint in it" if tags else "bring the files of all ranks there"
    )
    if (path / "latest").is_file():
        raise CheckpointError(
            f"{path} is of DeepSpeed, and its file latest names {_tag(path).name!r}, where no "
            "zero_pp_rank_…_optim_states.pt is: no checkpoint of ZeRO",
            remedy,
            tags,
        )
    if tags:
        raise CheckpointError(
            f"{path} is of DeepSpeed, without the file latest that names a checkpoint", remedy, tags
        )


def open_checkpoint(path: Path) -> Source:
    """Look at a checkpoint.

    Args:
        path: what was passed to `save_checkpoint`, or the tag's folder below it.

    Raises:
        CheckpointError: a rank's file is missing, DeepSpeed is too old, or the model was also split
            by tensor parallelism.
    """
    folder = _tag(path)
    files = list(_files(folder, "optim"))
    partitions = [_load(file)["optimizer_state_dict"] for file in files]
    stage = _stage(files[0], partitions[0])
    model_files = list(_files(folder, "model")) if stage == 3 else [folder / _MODEL]
    models = [_load(file) for file in model_files]
    _refuse(folder, partitions, models, stage)
    shapes: list[dict[str, torch.Size]] = models[0]["param_shapes"]
    masters, states = _trained(partitions, shapes, stage)
    groups = [
        {**group, "params": list(names)}
        for group, names in zip(_base(partitions[0], stage)["param_groups"], shapes, strict=True)
    ]
    client = {key: each for key, each in models[0].items() if key not in _INTERNAL}
    state = {
        "model": _model(folder, models, masters, stage),
        "optimizer": {"state": states, "param_groups": groups},
        "extra": ({key: each for key, each in client.items() if _is_plain(each)},),
    }
    kind = f"checkpoint of DeepSpeed ZeRO-{stage}, world size {len(files)}"
    return Source(kind, "deepspeed", state, (*files, *model_files))


def _trained(
    partitions: list[Any], shapes: list[dict[str, torch.Size]], stage: int
) -> tuple[dict[str, Stored], dict[str, dict[str, Stored]]]:
    """Master weights, and what the optimizer keeps, by parameter."""
    places = (_split_equally if stage == 3 else _mapped)(partitions, shapes)
    flats = _Flats(partitions, stage)
    states = {
        name: {kind: flats.stored(places[name], shape, kind) for kind in flats.kinds(places[name])}
        for group in shapes
        for name, shape in group.items()
    }
    return {name: state.pop(_MASTER) for name, state in states.items()}, states


def _model(
    folder: Path, models: list[Any], masters: dict[str, Stored], stage: int
) -> dict[str, Stored]:
    """Everything in the model's state dict."""
    module: Mapping[str, Tensor] = models[0]["module"]
    tied: Mapping[str, str] = models[0]["shared_params"]
    values = masters | (_frozen(models) if stage == 3 else {})
    whole = models[0]["buffer_names"] if stage == 3 else module.keys() - {*values, *tied}
    values |= {name: Stored(module[name].to("meta"), module[name].clone) for name in whole}
    values |= {name: values[of] for name, of in tied.items()}
    lost = [name for name in module if name not in values]
    if lost:
        raise CheckpointError(
            f"{folder} has no values of some parameters, which may be tied to others",
            "save it again with a newer DeepSpeed, which records that",
            lost,
        )
    return {name: values[name] for name in module}


class _Foreign:
    """Stands for an object of DeepSpeed's: neither its code nor any other in a file is run."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return not isinstance(value, _Foreign)


def _load(file: Path) -> dict[str, Any]:
    try:
        unknown = get_unsafe_globals_in_checkpoint(file)
        stubs: list[Any] = [(type(name, (_Foreign,), {}), name) for name in unknown]
        with safe_globals(stubs):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{file} cannot be read: {reason}", "take another tag of the checkpoint"
        ) from error


def _tag(path: Path) -> Path:
    latest = path / "latest"
    return path / latest.read_text(encoding="utf-8").strip() if latest.is_file() else path


def _files(folder: Path, kind: str) -> Iterator[Path]:
    """One a rank, in the order of ranks."""
    found = {
        int(match[1]): file
        for file in folder.glob("*.pt")
        if (match := _RANK.search(file.name)) and match[3] == kind and int(match[2]) == 0
    }
    yield from (found[rank] for rank in sorted(found))


def _stage(file: Path, partition: Mapping[str, Any]) -> int:
    stage = partition.get("zero_stage")
    number = stage.args[0] if isinstance(stage, _Foreign) else stage
    if number not in (1, 2, 3):
        raise CheckpointError(f"{file} is of no ZeRO stage", "load it with torch.load")
    return number


def _refuse(path: Path, partitions: list[Any], models: list[Any], stage: int) -> None:
    count = partitions[0]["partition_count"]
    wanted = max(count) if isinstance(count, list) else count
    if not len(partitions) == wanted == (len(models) if stage == 3 else wanted):
        raise CheckpointError(
            f"{path} was written by {wanted} ranks, and holds files of {len(partitions)}",
            "bring the files of all ranks to one folder",
        )
    if models[0].get("mp_world_size", 1) != 1:
        raise CheckpointError(
            f"{path} is split by tensor parallelism, too", "merge it with DeepSpeed first"
        )
    if stage < 3 and "param_slice_mappings" not in partitions[0]:
        raise CheckpointError(
            f"{path} was written by a DeepSpeed older than 0.8", "save it again with a newer one"
        )


def _mapped(partitions: list[Any], shapes: list[Any]) -> dict[str, list[_Fragment]]:
    """Stages 1 and 2."""
    places: dict[str, list[_Fragment]] = {}
    for rank, partition in enumerate(partitions):
        for group, mapping in enumerate(partition["param_slice_mappings"]):
            for name, place in mapping.items():
                fragment = _Fragment(rank, group, place.start, place.numel)
                places.setdefault(name, []).append(fragment)
    return places


def _split_equally(partitions: list[Any], shapes: list[Any]) -> dict[str, list[_Fragment]]:
    """Stage 3; its groups are cut into sub-groups, between parameters."""
    places: dict[str, list[_Fragment]] = {}
    sizes = [flat.numel() for flat in partitions[0]["fp32_flat_groups"]]
    group = start = 0
    for name, shape in (item for each in shapes for item in each.items()):
        if start == sizes[group]:
            group, start = group + 1, 0
        numel = -(-shape.numel() // len(partitions))
        places[name] = [_Fragment(rank, group, start, numel) for rank in range(len(partitions))]
        start += numel
    return places


class _Flats:
    """Partitions of every rank: master weights, and what the optimizer keeps of them."""

    def __init__(self, partitions: Sequence[Any], stage: int) -> None:
        masters = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        self._by_rank: list[list[dict[str, Any]]] = [
            [
                {_MASTER: flat, **_base(each, stage)["state"].get(group, {})}
                for group, flat in enumerate(each[masters])
            ]
            for each in partitions
        ]

    def kinds(self, places: Sequence[_Fragment]) -> list[str]:
        """What there is of a parameter."""
        return list(self._by_rank[places[0].rank][places[0].group])

    def stored(self, places: Sequence[_Fragment], shape: torch.Size, kind: str) -> Stored:
        """One `kind` of a parameter of `shape`; a number is one of the whole group."""
        flats = [self._by_rank[place.rank][place.group][kind] for place in places]
        if not isinstance(flats[0], Tensor) or not flats[0].ndim:
            number = torch.as_tensor(flats[0], dtype=torch.float32)
            return Stored(number.to("meta"), number.clone)

        def read() -> Tensor:
            pairs = zip(flats, places, strict=True)
            parts = [flat[place.start : place.start + place.numel] for flat, place in pairs]
            return torch.cat(parts)[: shape.numel()].view(shape)

        return Stored(meta(shape, flats[0].dtype), read)


def _base(partition: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    """State of the optimizer that DeepSpeed wraps."""
    return partition["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]


def _frozen(models: Sequence[Any]) -> dict[str, Stored]:
    def stored(name: str, shape: torch.Size) -> Stored:
        parts = [each["frozen_param_fragments"][name].flatten() for each in models]
        return Stored(
            meta(shape, parts[0].dtype),
            lambda: torch.cat(parts)[: shape.numel()].view(shape),
        )

    shapes: Mapping[str, torch.Size] = models[0].get("frozen_param_shapes") or {}
    return {name: stored(name, shape) for name, shape in shapes.items()}
