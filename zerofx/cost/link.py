"""How long a collective takes on an idle link: latency plus bytes over bandwidth (alpha-beta)."""

from __future__ import annotations

import dataclasses

from torch import fx

from zerofx.ir.facts import facts


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects a rank to the others.

    Attributes:
        bytes_per_second: that a rank can send while it receives as much.
        latency: seconds until the first byte of a collective arrives.
    """

    bytes_per_second: float
    latency: float

    def seconds(self, start: fx.Node) -> float:
        """Time of `unshard_start` or `reduce_start`; nothing if no byte leaves the rank."""
        return self.seconds_of(facts(start).wire_bytes)

    def seconds_of(self, sent: int) -> float:
        """Time of a collective in which a rank sends so many bytes."""
        return self.latency + sent / self.bytes_per_second if sent else 0.0
