"""Memory curves as functions of the batch size and of the depth, from a few traced ones.

A node's tensors grow in proportion to the batch, or not at all, so what is live at a node is
a + b·batch exactly, as long as two batch sizes give the same program; that is checked node by node.
In a stack of equal blocks it is affine in the number of blocks too, at each node counted from the
begin, and at each counted from the end; between them lie the blocks in the middle, whose values lie
between those of their neighbours, so that none of them is a peak.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from zerofx.cost.curve import Curve


class NotAlikeError(Exception):
    """Two programs differ where they should be the same."""


@dataclasses.dataclass(frozen=True)
class Line:
    """What is live at each of some nodes, as a function of the batch size.

    Attributes:
        nodes: names.
        blocks: of each node, the block of the model it belongs to.
        base: float64 `[nodes, 4]`, columns as in `Curve.live`.
        slope: the same, per sample.
    """

    nodes: tuple[str, ...]
    blocks: tuple[str, ...]
    base: NDArray[np.float64]
    slope: NDArray[np.float64]

    def at(self, batch: float) -> NDArray[np.float64]:
        """Bytes `[nodes, 4]` for this batch size."""
        return self.base + batch * self.slope


def line_of(curve: Curve) -> Line:
    """A curve that nobody will ask about another batch size."""
    return Line(
        curve.nodes, curve.blocks, curve.live.astype(np.float64), np.zeros(curve.live.shape)
    )


def line_through(one: Curve, batch: int, other: Curve, other_batch: int) -> Line:
    """The line through the curves of two batch sizes.

    Raises:
        NotAlikeError: they are curves of different programs.
    """
    check_alike(one.nodes, other.nodes)
    slope = (other.live - one.live) / (other_batch - batch)
    return Line(one.nodes, one.blocks, one.live - batch * slope, slope)


def deepen(shallow: Line, deeper: Line, blocks: tuple[int, int, int], *, few_grads: bool) -> Line:
    """The nodes of a deep program at which its peak may lie: around its first and last two blocks.

    Args:
        shallow: of at least three blocks; of so many that what is in flight has settled.
        deeper: of more.
        blocks: how many blocks they have, and the deep program.
        few_grads: full gradients do not pile up (stages 2 and 3): like all that is in flight they
            are bounded by the larger of both programs, in whatever block that is.

    Raises:
        NotAlikeError: the two programs are not made of equal blocks.
    """
    few, more, many = blocks
    order = list(dict.fromkeys(block for block in shallow.blocks if block))
    if len(order) != few:
        raise NotAlikeError(f"{len(order)} blocks where there should be {few}")
    second = [place for place, block in enumerate(shallow.blocks) if block == order[1]]
    last_but_one = [place for place, block in enumerate(shallow.blocks) if block == order[-2]]
    head = slice(0, second[-1] + 1)
    tail = slice(last_but_one[0] - len(shallow.nodes), None)
    grown = (many - few) / (more - few)
    most = np.maximum(shallow.at(1).max(axis=0), deeper.at(1).max(axis=0))
    parts = [_between(_cut(shallow, part), _cut(deeper, part), grown) for part in (head, tail)]
    # Reduced gradients of all blocks between are there at the end, and none at the begin.
    reduced = grown * (deeper.base[-1, 1] - shallow.base[-1, 1])
    for part, more_grads in zip(parts, (0, reduced), strict=True):
        part.base[:, 2:], part.slope[:, 2:] = most[2:], 0.0
        if few_grads:
            part.base[:, 1] = np.minimum(part.base[:, 1], most[1] + more_grads)
    return Line(
        tuple(name for part in parts for name in part.nodes),
        tuple(block for part in parts for block in part.blocks),
        np.concatenate([part.base for part in parts]),
        np.concatenate([part.slope for part in parts]),
    )


def _between(shallow: Line, deeper: Line, grown: float) -> Line:
    check_alike(shallow.nodes, deeper.nodes)
    return dataclasses.replace(
        shallow,
        base=shallow.base + grown * (deeper.base - shallow.base),
        slope=shallow.slope + grown * (deeper.slope - shallow.slope),
    )


def _cut(line: Line, part: slice) -> Line:
    return Line(line.nodes[part], line.blocks[part], line.base[part], line.slope[part])


def check_alike(one: Iterable[str], other: Iterable[str]) -> None:
    """Compare names of nodes, whose numbers do not count.

    Raises:
        NotAlikeError: they are of different programs.
    """
    left, right = [list(map(_kind, names)) for names in (one, other)]
    if left != right:
        raise NotAlikeError(f"{len(left)} and {len(right)} nodes, or other ones")


def _kind(name: str) -> str:
    return re.sub(r"(_\d+)+$", "", name)
