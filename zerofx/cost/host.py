"""What Python and the optimizer cost between kernels, and how communication slows computation."""

from __future__ import annotations

import dataclasses

from torch import fx

from zerofx.cost.processor import FREE_CORES, Processor
from zerofx.ir.ops import is_start, is_wait


@dataclasses.dataclass(frozen=True)
class Host:
    """The processor that launches kernels and collectives; seconds.

    `zerofx.frontend.trial` measures it. By default it costs nothing.

    Attributes:
        program: to enter a program and to leave it: guards, autograd, wrapping of results.
        collective: to start a collective and to wake up at its end, beside the link's latency.
        member: of a collective: its share of the start, and its wait.
        kernel: to launch one.
        update: of one parameter in the optimizer's step.
        update_rate: bytes per second that the optimizer's kernels move; 0: as other kernels.
        contention: the share of a collective's time that kernels running meanwhile lose to it. 1
            where processors of ranks also copy the messages, so that nothing is hidden.
        processor: what ranks ask of cores that they share.
        runs_ahead: whether kernels run elsewhere (CUDA) while the host goes on.
    """

    program: float = 0.0
    collective: float = 0.0
    member: float = 0.0
    kernel: float = 0.0
    update: float = 0.0
    update_rate: float = 0.0
    contention: float = 0.0
    processor: Processor = FREE_CORES
    runs_ahead: bool = False

    def seconds(self, node: fx.Node) -> float:
        """Python's time for a node that communicates."""
        if is_start(node):
            return self.collective
        return self.member if is_wait(node) else 0.0


NO_HOST = Host()
"""Of a machine on which only kernels and bytes take time."""
