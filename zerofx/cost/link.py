"""How long a collective takes on an idle link: latency plus bytes over bandwidth (alpha-beta)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects a rank to the others.

    Attributes:
        bytes_per_second: that a rank can send while it receives as much.
        latency: seconds until the first byte of a collective arrives.
    """

    bytes_per_second: float
    latency: float

    def seconds_of(self, sent: int) -> float:
        """Time of a collective in which a rank sends so many bytes; none if no byte leaves it."""
        return self.latency + sent / self.bytes_per_second if sent else 0.0
