"""The ranks that hold a model, which write and read its checkpoints together."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerofx.errors import CheckpointError
from zerofx.runtime.handles import note_call
from zerofx.runtime.members import gloo_group, idle_groups, named, ranks_of, take_idle
from zerofx.torch_private import default_store, unwrap_compiled

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Ranks that come to every call together.

    Attributes:
        numbers: global ones, ascending; empty where one process is without a process group.
        group: theirs; `None` if they are all ranks.
    """

    numbers: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def alone(self) -> bool:
        """Whether there is no process group."""
        return not self.numbers

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what only one does."""
        return self.alone or dist.get_rank() == self.numbers[0]

    @property
    def position(self) -> int:
        """That of this rank among them."""
        return 0 if self.alone else self.numbers.index(dist.get_rank())

    def agreed(self, look: Callable[[], Result]) -> Result:
        """The first rank looks, for all: what it returns or raises, every rank does.

        Raises:
            CheckpointError: on all ranks, what the first raised, or instead of it.
        """
        verdict: list[Any] = [*_verdict(look)] if self.is_first else [None, None]
        if not self.alone:
            dist.broadcast_object_list(verdict, self.numbers[0], group=self.group)
        if verdict[1] is not None:
            raise verdict[1]
        return verdict[0]

    def everyones(self, look: Callable[[], Result]) -> list[Result]:
        """Every rank looks: what they return, in their order.

        Raises:
            CheckpointError: on all ranks, what the first of those raised that did; names it.
        """
        verdicts = [_verdict(look if self.alone else lambda: _named_if_it_raises(look))]
        if not self.alone:
            verdicts *= len(self.numbers)
            dist.all_gather_object(verdicts, verdicts[0], group=self.group)
        for _, error in verdicts:
            if error is not None:
                raise error
        return [found for found, _ in verdicts]

    def claim(self, path: str | os.PathLike[str]) -> str:
        """Refuse a path that other ranks of this job save another model to.

        Returns:
            What parts of a model have in common that this job saves for the same time there: some
            ranks alone come here for one. "" if all do.

        Raises:
            CheckpointError: on all ranks.
        """
        if self.group is not None:
            return self.agreed(lambda: self._claim(Path(path).resolve()))
        return ""

    def spare_group(self) -> dist.ProcessGroup | None:
        """A group of these ranks for a thread, which leaves it idle; `None` without ranks.

        Where ranks make one they wait for each other, and hear no signal: that is done once.
        """
        if self.alone:
            return None
        names = self.everyones(lambda: idle_groups(self.numbers))
        common = [name for name in names[0] if all(name in each for each in names)]
        return take_idle(common[0]) if common else gloo_group(self.numbers)

    def _claim(self, path: Path) -> str:
        mine, store = named(self.numbers), default_store()
        holders = store.compare_set(f"zerofx/checkpoint/{path}", "", mine).decode()
        if holders != mine:
            raise CheckpointError(
                f"ranks {mine} save to {path}, where ranks {holders} have saved their model",
                "give what each group of ranks trains a path of its own",
            )
        job = store.compare_set("zerofx/checkpoint", "", uuid.uuid4().hex).decode()
        return f"{job} {store.add(f'zerofx/checkpoint/saves/{path}', 1)}"


def all_ranks() -> Ranks:
    """Those of the job."""
    if not dist.is_available() or not dist.is_initialized():
        return Ranks((), None)
    return Ranks(tuple(range(dist.get_world_size())), None)


def ranks_that_hold(model: nn.Module, call: str) -> Ranks:
    """Those of the mesh that the model is sharded on; all ranks if it is plain.

    Args:
        model: sharded or plain.
        call: what they come to together, which is noted.

    Raises:
        CheckpointError: it is no module, or its parameters lie on different ranks, or on a 2-D mesh
            of some.
    """
    if not isinstance(model, nn.Module):
        raise CheckpointError(
            f"{call} got a {type(model).__name__} for the model", "pass the model itself"
        )
    everyone = all_ranks()
    if everyone.alone:
        return everyone
    note_call(call, type(unwrap_compiled(model)).__name__, model.parameters())
    meshes = {each.device_mesh for each in model.parameters() if isinstance(each, DTensor)}
    held_by = {tuple(ranks_of(mesh)): mesh for mesh in meshes}
    if len(held_by) > 1:
        raise CheckpointError(
            "parameters of the model lie on different ranks",
            "save and load its modules one by one, each on the ranks that hold it",
            [f"ranks {named(ranks)}" for ranks in held_by],
        )
    for ranks, mesh in held_by.items():
        if len(ranks) < dist.get_world_size():
            return Ranks(ranks, _group(mesh))
    return everyone


def _verdict(look: Callable[[], Any]) -> tuple[Any, CheckpointError | None]:
    """What it returns, or what it raises, or something to raise instead."""
    try:
        return look(), None
    except CheckpointError as error:
        return None, error
    except Exception as error:  # a full disk, no permission: the others must not wait
        where = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
        said = f"{type(error).__name__}{where}: {error}"
        return None, CheckpointError(said).with_traceback(error.__traceback__)


def _named_if_it_raises(look: Callable[[], Result]) -> Result:
    try:
        return look()
    except CheckpointError as error:
        said = f"rank {dist.get_rank()}: {error.problem}"
        raise CheckpointError(said, error.remedy, error.offenders) from error


def _group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim > 1:
        raise CheckpointError(
            f"the model lies on a mesh {tuple(mesh.shape)} of some ranks, which have no group",
            "make one of them, and save by torch.distributed.checkpoint.save(process_group=…)",
        )
    return mesh.get_group()
