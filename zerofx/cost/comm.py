"""Which c10d calls realise a gather or a reduction, by backend and kind of device.

Measured with 2 and 4 ranks on one host, gloo, torch 2.13, 64 MB full size, milliseconds
(`torchrun --nproc-per-node 2 -m zerofx bench comm` measures anew):

| ranks | all-gather native | point-to-point | reduce-scatter native | exchange and add |
|-------|-------------------|----------------|-----------------------|------------------|
| 2     | 88                | 26             | 99                    | 40               |
| 4     | 123               | 42             | 174                   | 57               |

gloo's own reduce-scatter is an all-reduce and puts twice the bytes on the wire; the exchange sends
each rank only what it owns. Point-to-point calls of gloo need host memory. Where several ranks
share each of several nodes, two hops (inside the node, then between nodes) put half the bytes of
the direct exchange on the link of a node of two ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Algorithm = Literal["native", "point_to_point", "two_hop"]


@dataclasses.dataclass(frozen=True)
class Algorithms:
    """One choice per collective.

    Attributes:
        all_gather: how chunks are gathered.
        reduce_scatter: how gradients are averaged and split.
        pack_bytes: gradients of a bucket up to this size travel in one message; larger ones travel
            from and to where they lie.
    """

    all_gather: Algorithm
    reduce_scatter: Algorithm
    pack_bytes: int = 256 << 10

    @property
    def pack_chunk_bytes(self) -> int:
        """The same of chunks that are gathered, and copied both before and after they travel."""
        return self.pack_bytes // 2

    @property
    def untagged(self) -> bool:
        """Whether ranks out of step could mix values without a hang."""
        return "native" in (self.all_gather, self.reduce_scatter)


_NATIVE = Algorithms("native", "native")
_DIRECT = {("gloo", "cpu"): Algorithms("point_to_point", "point_to_point")}
_SPANNING = {("gloo", "cpu"): Algorithms("two_hop", "two_hop")}


def algorithms_for(backend: str, device_type: str, size: int, node_size: int) -> Algorithms:
    """The measured choice, else the backend's own collectives.

    Args:
        backend: as c10d names it.
        device_type: of the tensors.
        size: ranks of the group.
        node_size: how many of them share a node.
    """
    measured = _SPANNING if 1 < node_size < size else _DIRECT
    return measured.get((backend, device_type), _NATIVE)
