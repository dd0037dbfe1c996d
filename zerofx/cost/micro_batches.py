"""The micro-batches of a step: what each of them sends, and what travels once for all."""

from __future__ import annotations

import dataclasses

from torch import fx

from zerofx.config import ZeroConfig
from zerofx.ir.codes import all_reduced_bytes
from zerofx.ir.facts import facts
from zerofx.ir.ops import REDUCE_START, is_call
from zerofx.ir.program import Program


@dataclasses.dataclass(frozen=True)
class Traveled:
    """What a step sends in one collective.

    Attributes:
        runs: how often it sends something.
        wire_bytes: that a rank sends in all of these.
        across_bytes: those that leave the rank's node.
    """

    runs: float = 0.0
    wire_bytes: float = 0.0
    across_bytes: float = 0.0

    def plus(self, other: Traveled) -> Traveled:
        """Both."""
        return Traveled(
            self.runs + other.runs,
            self.wire_bytes + other.wire_bytes,
            self.across_bytes + other.across_bytes,
        )


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Those of one optimizer step.

    Attributes:
        number: of them, as `accumulate` says.
        hybrid: whether groups of ranks hold the same shards.
    """

    number: int = 1
    hybrid: bool = False

    @classmethod
    def of(cls, config: ZeroConfig) -> MicroBatches:
        """As `config` says."""
        return cls(config.accumulate, is_hybrid(config))

    def traveled(
        self, program: Program, start: fx.Node, sent: int, runs: float, nested: int = 1
    ) -> Traveled:
        """What a step sends in one collective of a graph.

        Args:
            program: where it is.
            start: of the collective.
            sent: bytes that a rank sends in one run.
            runs: how often a step runs the graph.
            nested: how many of these runs precede their backward.
        """
        across = program.bytes_across_nodes(start, sent)
        layout, once = program.params[facts(start).members[0]].layout, runs / self.number
        if is_call(start, REDUCE_START):
            held = program.stage < 2 or (self.hybrid and not layout.sharded)
            often = once if held else runs  # gradients that are held back travel once for all
        else:
            # A resident copy is gathered once after each optimizer step, for each of the equal
            # blocks that share a graph.
            often = min(runs, nested) if layout.resident else runs
        # On a hybrid mesh the hop between replicas waits for the last backward.
        waits = self.hybrid and once < often
        shared = all_reduced_bytes(program, start) if waits else 0
        apart = shared if layout.replicas_apart else 0
        return Traveled(
            often,
            often * (sent - shared) + once * shared,
            often * (across - apart) + once * apart,
        )


ONE_MICRO_BATCH = MicroBatches()
"""Nothing is held back."""


def is_hybrid(config: ZeroConfig) -> bool:
    """Whether groups of ranks hold the same shards."""
    return config.replicate > 1 if config.mesh is None else config.mesh.ndim == 2
