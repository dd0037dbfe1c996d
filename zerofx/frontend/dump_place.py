"""Where the programs of a model are written, by which rank, and the numbers of graphs there."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx.runtime.members import ranks_of

_taken: collections.defaultdict[str, set[int]] = collections.defaultdict(set)


@dataclasses.dataclass(frozen=True)
class DumpPlace:
    """The place of a model's programs.

    Attributes:
        folder: of the page and of `graph0`, `graph1`, …, the same on all ranks; empty if there is
            none.
        is_ours: whether this rank writes into it.
    """

    folder: str
    is_ours: bool

    @property
    def written(self) -> str:
        """The folder into which this rank writes; empty if it writes nothing."""
        return self.folder if self.is_ours else ""

    def take_number(self) -> int:
        """The least number that no graph of this process has there.

        Each folder counts from 0: what an older run left in it goes with the first graph.
        """
        number = next(each for each in itertools.count() if each not in _taken[self.folder])
        _taken[self.folder].add(number)
        return number

    def give_back(self, number: int) -> None:
        """Tell that Dynamo took the graph back."""
        _taken[self.folder].discard(number)


def place_of(dump: str, mesh: DeviceMesh | None) -> DumpPlace:
    """Where the first rank of `mesh` writes: into `dump` itself if it is rank 0.

    Args:
        dump: the option; may be empty.
        mesh: of the model.
    """
    if not dump:
        return DumpPlace("", is_ours=False)
    folder = Path(dump).absolute()  # the process may go elsewhere
    if not dist.is_initialized():
        return DumpPlace(str(folder), is_ours=True)
    first = ranks_of(mesh)[0]
    return DumpPlace(
        str(folder / f"rank{first}" if first else folder), is_ours=dist.get_rank() == first
    )
