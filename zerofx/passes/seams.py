"""Where a program can be cut without losing fusion."""

from __future__ import annotations

import bisect

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from zerofx.ir.ops import computes
from zerofx.ir.program import Program
from zerofx.ir.view import aliased_inputs, positions


class Seams:
    """Gaps between the kernels of a program.

    Gap `k` lies before the `k`-th node that computes; views, inputs and communication compute
    nothing. A seam is a gap next to a kernel that the inner compiler fuses with nothing (matrix
    products, convolutions, attention), or one of the two ends.
    """

    def __init__(self, program: Program) -> None:
        self._output = program.output
        self._place = positions(program.graph)
        self._kernels = [node for node in program.graph.nodes if _computes(node)]
        self._at = [self._place[node] for node in self._kernels]
        alone = [is_matrix_kernel(node) for node in self._kernels]
        self.end = len(self._kernels)
        self._seams = [
            gap
            for gap in range(self.end + 1)
            if gap in (0, self.end) or alone[gap] or alone[gap - 1]
        ]

    def gap(self, node: fx.Node) -> int:
        """The gap that `node` lies in."""
        return bisect.bisect_left(self._at, self._place[node])

    def node(self, gap: int) -> fx.Node:
        """The node before which a gap ends."""
        return self._kernels[gap] if gap < self.end else self._output

    def at_or_before(self, node: fx.Node) -> int:
        """The last seam that does not lie behind `node`."""
        return self._seams[bisect.bisect_right(self._seams, self.gap(node)) - 1]

    def at_or_after(self, node: fx.Node) -> int:
        """The first seam that does not lie before `node`."""
        return self._seams[bisect.bisect_left(self._seams, self.gap(node))]


def is_matrix_kernel(node: fx.Node) -> bool:
    """Whether the inner compiler runs `node` as a kernel of its own."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def _computes(node: fx.Node) -> bool:
    if not computes(node):
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    # Arithmetic of sizes launches no kernel; what reads a size off a tensor stays behind that.
    values = (node, *node.all_input_nodes)
    tensors = any(isinstance(each.meta.get("val"), (Tensor, tuple, list)) for each in values)
    return tensors and not aliased_inputs(node)
