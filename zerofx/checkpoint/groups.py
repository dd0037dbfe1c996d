"""Groups of parameters: which of a checkpoint's are which of an optimizer's."""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

Group = dict[str, Any]
"""Settings, and names of parameters under `params`."""


def match(
    saved: Sequence[Group], mine: Sequence[Group], optimizers: Sequence[Optimizer]
) -> tuple[dict[int, int], list[str]]:
    """Find the groups that have the same parameters; a parameter that either lacks is no matter.

    Args:
        saved: groups of the checkpoint.
        mine: as many, of the optimizers.
        optimizers: whose groups they are; several keep their order.

    Returns:
        For the number of each group its number in the checkpoint, and what does not fit, by name.
    """
    owners = [number for number, each in enumerate(optimizers) for _ in each.param_groups]
    home = {name: there for there, group in enumerate(saved) for name in group["params"]}
    places = [(name, here) for here, group in enumerate(mine) for name in group["params"]]
    shared = collections.Counter((here, home[name]) for name, here in places if name in home)
    empty = [
        [number for number, group in enumerate(groups) if not group["params"]]
        for groups in (mine, saved)
    ]
    found: dict[int, int] = {}
    taken: set[int] = set()
    for here, there in [*(pair for pair, _ in shared.most_common()), *zip(*empty, strict=False)]:
        if here not in found and there not in taken and owners[here] == owners[there]:
            found[here] = there
            taken.add(there)
    moved = [
        f"{name}: group {home.get(name, 'none')} in the checkpoint, {here} here"
        for name, here in places
        if here not in found or home.get(name, found[here]) != found[here]
    ]
    return found, moved


def asked(mine: Group, number: int, saved: Mapping[str, Any]) -> Group:
    """What a checkpoint's group has, to be filled: schedules write settings such as `initial_lr`.

    Args:
        mine: the group of that number here, whose names are kept.
        number: of the group.
        saved: what the checkpoint holds, by name.
    """
    prefix = f"optimizer.param_groups.{number}."
    found: Group = {}
    for name, stored in saved.items():
        if name.startswith(prefix):
            key = name.removeprefix(prefix)
            found[key] = _memory(stored, mine.get(key))
    for key, value in mine.items():
        inside = [each for each in found if each.startswith(f"{key}.")]
        if inside and key not in found:  # tensors in a list or a dict
            found = {each: found[each] for each in found if each not in inside}
            found[key] = copy.deepcopy(value)
    return {**found, "params": mine["params"]}


def _memory(stored: Any, like: Any) -> Tensor | None:
    """For a tensor; anything else is put where `None` was."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    device = like.device if isinstance(like, Tensor) else "cpu"
    return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)
