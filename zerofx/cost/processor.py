"""What the ranks of a node ask of the cores that they share, kernels and messages alike."""

from __future__ import annotations

import dataclasses

from torch import fx

from zerofx.ir.ops import REDUCE_START, is_call, is_start, is_wait, started_by


@dataclasses.dataclass(frozen=True)
class Processor:
    """Work of one rank, in seconds of one core, whichever of its threads does it.

    `zerofx.frontend.trial` measures it. By default cores are no bottleneck.

    Attributes:
        ranks_per_core: ranks of a node over its cores; 0 where other devices compute.
        threads: that a rank's kernels use.
        program: to enter a program and to leave it.
        collective: to start a collective, and to be woken at its end.
        member: of a collective: its share.
        kernel: to launch one.
        gathered: for each byte that a gather sends, the network's stack included.
        reduced: for each byte that a reduction sends.
    """

    ranks_per_core: float = 0.0
    threads: int = 1
    program: float = 0.0
    collective: float = 0.0
    member: float = 0.0
    kernel: float = 0.0
    gathered: float = 0.0
    reduced: float = 0.0

    @property
    def crowding(self) -> float:
        """How much longer a kernel takes when all ranks run it at once than when one does."""
        return max(1.0, self.ranks_per_core * self.threads)


FREE_CORES = Processor()
"""Of a machine with cores to spare."""


class Cores:
    """The cores of a node, from the begin of a program: no rank is ahead of their work for all.

    Attributes:
        busy_until: seconds until they have done for all ranks what was taken so far.
    """

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._moving: dict[fx.Node, float] = {}
        self.busy_until = self._for_all(processor.program)

    def take(self, node: fx.Node, took: float, coding: float, sent: int) -> None:
        """Do one more node. A collective's work is done when the first wait for it is over.

        Args:
            node: the next in execution order.
            took: seconds of its kernels while all ranks run them, or of its collective.
            coding: seconds of its kernels that make or read codes, while all ranks run them.
            sent: bytes that a rank sends, if it is a collective.
        """
        each = self._processor
        if is_start(node):
            if took:
                rate = each.reduced if is_call(node, REDUCE_START) else each.gathered
                self._moving[node] = each.collective + rate * sent
        elif is_wait(node):
            self.busy_until += self._for_all(each.member + self._moving.pop(started_by(node), 0.0))
        elif took:
            self.busy_until += self._for_all(each.kernel)
            coding += took
        self.busy_until += coding * min(1.0, each.ranks_per_core * each.threads)

    def _for_all(self, seconds: float) -> float:
        return self._processor.ranks_per_core * seconds
