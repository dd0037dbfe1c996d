"""What optimizers remember of each parameter, as a checkpoint holds it and as they have it here."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from zerofx.runtime.params import params_of
from zerofx.sharding.weights import plain_name

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint holds of optimizers.

    Attributes:
        stored: everything in it, by name.
        keys: of state, by all that names of state begin with, such as names of parameters.
        settings: of each group, by its number: what is stored of it, by name.
    """

    stored: Mapping[str, Any]
    keys: Mapping[str, set[str]]
    settings: Mapping[str, State]

    def lacks(self, optimizer: Optimizer, numbers: Sequence[int]) -> set[str]:
        """Settings that such an optimizer has from the start, and its groups there have not."""
        known = [_settings_in(self.settings.get(str(each), {})) for each in numbers]
        # DCP has no name for an empty dict.
        mine = [key for key, value in optimizer.defaults.items() if not isinstance(value, dict)]
        return {key for key in mine if not all(key in each for each in known)}

    def strange(self, optimizer: Optimizer, numbers: Sequence[int]) -> set[str]:
        """Settings of groups there that such an optimizer does not have."""
        mine = {key for group in optimizer.param_groups for key in group}
        known = (_settings_in(self.settings.get(str(each), {})) for each in numbers)
        # Schedules write the rate that they began with; names come and go.
        return set().union(*known) - mine - {"initial_lr", "param_names"}


def saved_in(metadata: Metadata) -> Saved:
    """Look through the names in a checkpoint, once; those of parameters may have dots."""
    keys: dict[str, set[str]] = collections.defaultdict(set)
    settings: dict[str, State] = collections.defaultdict(dict)
    for name, stored in metadata.state_dict_metadata.items():
        if name.startswith("optimizer.state."):
            first, *others = name.removeprefix("optimizer.state.").split(".")
            for piece in others:
                keys[first].add(piece)
                first = f"{first}.{piece}"
        elif name.startswith("optimizer.param_groups."):
            settings[name.split(".")[2]][name] = stored
    return Saved(metadata.state_dict_metadata, keys, settings)


def numbered(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, list[int]]]:
    """Optimizers, and the numbers that their groups have among those of all."""
    start = 0
    for each in optimizers:
        stop = start + len(each.param_groups)
        yield each, [*range(start, stop)]
        start = stop


def add_late(
    wanted: State, model: Mapping[str, Any], optimizers: Sequence[Optimizer], saved: Saved
) -> None:
    """Make memory for state that an optimizer has not after its first step, but had when saved.

    Args:
        wanted: the state of all optimizers, to which it is added.
        model: values by name.
        optimizers: of which a checkpoint has all settings: others may be of another kind.
        saved: the checkpoint.
    """
    for optimizer, numbers in numbered(optimizers):
        if saved.lacks(optimizer, numbers):
            continue
        for name in _names(wanted, numbers):
            mine = wanted["state"].get(name, {})
            late = saved.keys.get(name, set()) - keys_of(mine)
            places = {key: f"optimizer.state.{name}.{key}" for key in late}
            if not late or name not in model or not keys_of(mine) <= saved.keys[name]:
                continue
            if all(_can_be_made(saved.stored.get(at), model[name]) for at in places.values()):
                made = {key: _made(saved.stored[at], model[name]) for key, at in places.items()}
                wanted["state"][name] = {**mine, **made}


def other_kinds(
    wanted: State, optimizers: Sequence[Optimizer], saved: Saved
) -> Iterator[tuple[str, str]]:
    """Optimizers that are of another kind than in the checkpoint: their names, and why."""
    for optimizer, numbers in numbered(optimizers):
        kind = type(optimizer).__name__
        if any(str(each) not in saved.settings for each in numbers):
            continue  # there are fewer groups, which is said elsewhere
        names = [*_names(wanted, numbers)]
        pairs: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for name in names:
            there, here = saved.keys.get(name, set()), keys_of(wanted["state"].get(name, {}))
            if there and there != here:
                pairs[_listed(there), _listed(here)].append(name)
        for (there, here), which in pairs.items():
            more = f" and {len(which) - 1} more" if len(which) > 1 else ""
            yield kind, f"{which[0]}{more}: {there} in the checkpoint, {here} here"
        lacks, strange = saved.lacks(optimizer, numbers), saved.strange(optimizer, numbers)
        if lacks and strange and not any(name in saved.keys for name in names):
            yield kind, f"settings: {_listed(strange)} in the checkpoint, {_listed(lacks)} here"


def keys_of(entries: Mapping[Any, Any]) -> set[str]:
    """The keys of a parameter's state, as names in a checkpoint show them."""
    return {str(key).partition(".")[0] for key in entries}


def keep_dtypes(optimizer: Optimizer, part: State) -> None:
    """Undo that torch casts state to the dtype of its parameter where it is loaded.

    Args:
        optimizer: that has loaded it.
        part: what it loaded, in dtypes that it makes itself.
    """
    names = (name for group in part["param_groups"] for name in group["params"])
    for param, name in zip(params_of(optimizer), names, strict=True):
        mine = optimizer.state.get(param, {})
        for key, value in part["state"].get(name, {}).items():
            if key in mine and key != "step":  # whose dtype torch chooses by options
                mine[key] = _uncast(mine[key], value, param.dtype)


@contextlib.contextmanager
def thawed(model: nn.Module, saved: Saved) -> Iterator[None]:
    """Parameters that are frozen by now, and have state in a checkpoint, get state inside."""
    named = nn.Module.named_parameters(model, remove_duplicate=False)
    kept = [param for name, param in named if plain_name(name) in saved.keys]
    frozen = [param for param in kept if not param.requires_grad]
    try:
        for param in frozen:
            param.requires_grad_(True)
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def _uncast(loaded: Any, given: Any, dtype: torch.dtype) -> Any:
    """What was loaded, but where it is in a dtype that it was not given in."""
    if isinstance(loaded, Tensor) and isinstance(given, Tensor):
        cast = loaded.dtype == dtype != given.dtype and loaded.shape == given.shape
        return given.to(loaded.device) if cast else loaded
    if isinstance(loaded, dict) and isinstance(given, dict):
        return {key: _uncast(each, given.get(key), dtype) for key, each in loaded.items()}
    if isinstance(loaded, list) and isinstance(given, list) and len(loaded) == len(given):
        return [_uncast(*pair, dtype) for pair in zip(loaded, given, strict=True)]
    return loaded


def _names(wanted: State, numbers: Sequence[int]) -> Iterator[str]:
    """Names of the parameters in these groups."""
    return (name for each in numbers for name in wanted["param_groups"][each]["params"])


def _can_be_made(stored: Any, param: Tensor) -> bool:
    if isinstance(stored, TensorStorageMetadata):
        return stored.size == param.shape or len(stored.chunks) == 1
    return stored is not None  # else it is nested


def _made(stored: Any, param: Tensor) -> Tensor | None:
    """Memory for a tensor; anything else is put where `None` was."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if stored.size == param.shape:
        return torch.zeros_like(param, dtype=stored.properties.dtype)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _settings_in(group: Mapping[str, Any]) -> set[str]:
    """Names of settings; those of what DCP opens begin alike."""
    return {name.split(".")[3] for name in group}


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "none"
