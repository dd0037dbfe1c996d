"""When buffers get rank 0's values: the `broadcast_buffers` of `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from zerofx.runtime import collectives
from zerofx.runtime.comm import Comm, serves
from zerofx.runtime.members import gloo_group

if TYPE_CHECKING:
    from zerofx.runtime.session import Session


class BufferSync:
    """Before a forward, and not inside of it: what parts of it write there stays until it ends.

    A forward may run in parts. Those of `torch.compile(model)` say when they begin. With
    `model.compile()`, and where blocks are compiled, a part is the first one if a backward has
    ended since the last, or if it has run in this forward already. As there, tensors that are
    assigned to buffers later are buffers; unless ranks have other shapes (a hidden state of its
    batch, for one), where those stay the rank's own.
    """

    def __init__(self) -> None:
        self._marks: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._knows_buffers = False
        self._begun: bool | None = None  # `None` where this forward did not say it
        self._at_once = True
        self._parts: set[Hashable] = set()
        self._trains = False
        self._trained = self._changes = False  # alike on all ranks
        self._group: dist.ProcessGroup | None = None  # that answers whether any changed

    def forward_begins(self, session: Session, *, trains: bool) -> None:
        """The next part is the first; `trains` says whether the forward has a backward.

        Where Python runs some parts, buffers get their values at once: such a part may write to its
        own before it is heard of.
        """
        self._begun, self._trains = True, trains
        if not self._at_once:
            return
        self._at_once = False
        root = session.root()
        if root is not None and next(root.buffers(), None) is not None:
            self.before_part(session, "all", (), trains=trains)

    def before_eager_part(
        self, session: Session, part: Hashable, buffers: Sequence[Tensor], *, trains: bool
    ) -> None:
        """As `before_part`, of a part that Python runs."""
        self._at_once = True
        self.before_part(session, part, buffers, trains=trains)

    def before_part(
        self, session: Session, part: Hashable, buffers: Sequence[Tensor], *, trains: bool
    ) -> None:
        """Give all buffers of the model rank 0's values, if a forward begins and any changed.

        Whether any changed is a question to all ranks if the forward trains: one of them alone may
        have taken the branch that writes (a codebook that restarts dead codes). If any did before,
        it is one in the first forward after such a one, too. Elsewhere, ranks that evaluate alone
        among them, each rank answers it for itself; so it does in a second forward before a
        backward where forwards do not say when they begin.

        Args:
            session: the model.
            part: of the forward; the same object, or an equal one, whenever it runs.
            buffers: that it reads or writes.
            trains: whether it is part of a forward that has a backward.
        """
        begins, asks = self._is_first(part, trains)
        if not begins or session.world.size == 1:
            return
        asks = asks or (self._changes and self._trained and not self._trains)
        self._trained = self._trains
        root = session.root()
        every = [each for each in (buffers if root is None else root.buffers()) if _is_plain(each)]
        known = [each for each in every if each in self._marks] if self._knows_buffers else every
        changed = self._any_changed(every if asks else known)
        if asks:
            changed, alike = self._anywhere(changed, every, session)
            known = every if alike else known
        if changed:
            # All of them: eager BatchNorm raises the version of its counter, not of its statistics.
            world = session.world
            with session.recorded("broadcast", f"{len(known)} buffers") as wait:
                collectives.broadcast_coalesced(known, world.group, world.ranks[0], wait)
            self.agree(known)

    def _is_first(self, part: Hashable, trains: bool) -> tuple[bool, bool]:
        """Whether a part is the first of its forward; and whether ranks ask each other then."""
        if self._begun is not None:
            begins, self._begun = self._begun, False
            return begins, begins and self._trains
        asks = trains and not (self._parts and self._trains)
        begins = asks or not self._parts or part in self._parts
        if begins:
            self._parts, self._trains = set[Hashable](), trains
        self._parts.add(part)
        return begins, asks

    def of_all_ranks(self, buffers: Iterable[Tensor], session: Session) -> list[Tensor]:
        """Those that ranks can give each other: all, or where shapes differ those agreed before."""
        every = [each for each in buffers if _is_plain(each)]
        _, alike = self._anywhere(False, every, session)
        return every if alike else [each for each in every if each in self._marks]

    def agree(self, buffers: Iterable[Tensor]) -> None:
        """All ranks hold the same values in `buffers` now, which are those of the model."""
        self._knows_buffers = True
        self._marks.update((buffer, _mark(buffer)) for buffer in buffers)

    def will_change(self, buffers: Iterable[Tensor]) -> None:
        """Programs, and kernels of normalisation, write to them: autograd counts no version."""
        self._marks.update((buffer, None) for buffer in buffers if buffer in self._marks)

    def moved(self) -> None:
        """The model has other tensors (`.to()`)."""
        self._knows_buffers = False
        self._marks.clear()

    def backward_ended(self) -> None:
        """The next part begins a forward."""
        self._begun = None
        self._parts.clear()

    def _any_changed(self, buffers: Iterable[Tensor]) -> bool:
        return any(self._marks.get(buffer) != _mark(buffer) for buffer in buffers)

    def _anywhere(
        self, changed: bool, buffers: Iterable[Tensor], session: Session
    ) -> tuple[bool, bool]:
        """Whether it is so on any rank, and whether all have buffers of the same shapes."""
        if self._group is None:
            self._group = _group_on_cpus(session.world)
        # Hashes of numbers are the same in all processes.
        shapes = hash(tuple((*each.shape, each.dtype.itemsize) for each in buffers))
        flag = torch.tensor([changed, shapes, ~shapes], dtype=torch.int64, device="cpu")
        with session.recorded("all_reduce", "whether buffers changed"):
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
            session.watch.wait(work)  # on the CPU, wherever the model is
        anywhere, most, least = flag.tolist()
        self._changes = self._changes or bool(anywhere)
        return bool(anywhere), most == ~least


def _group_on_cpus(world: Comm) -> dist.ProcessGroup:
    """Of all ranks of a model; NCCL would answer only when the GPU is done with what it does."""
    if serves(world.group, "cpu"):
        return world.group
    return gloo_group(world.ranks)


def _is_plain(buffer: Tensor) -> bool:
    """Masks of parameters are sharded as these are."""
    return not isinstance(buffer, DTensor) and buffer.layout is torch.strided


def _mark(buffer: Tensor) -> tuple[int, int]:
    return 0 if buffer.is_inference() else buffer._version, buffer.data_ptr()
