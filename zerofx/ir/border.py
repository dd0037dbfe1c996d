"""What those who call a program rely on: what it is given by position, and what it gives."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, fx

from zerofx.ir.program import Program
from zerofx.ir.spec import Region


@dataclasses.dataclass(frozen=True)
class Border:
    """Of one form of a program.

    Attributes:
        inputs: in their order.
        first: place of the first output that is no value of the user's.
        outputs: from there on.
    """

    inputs: tuple[fx.Node, ...]
    first: int
    outputs: tuple[Any, ...]

    @staticmethod
    def of(program: Program) -> Border:
        """That of a program as it is now."""
        inputs = tuple(program.graph.find_nodes(op="placeholder"))
        first = 0 if program.region is Region.BACKWARD else program.num_user_outputs
        return Border(inputs, first, tuple(program.outputs[first:]))


def look(value: Any) -> str:
    """Dtype and shape of an output, in words."""
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(val, Tensor):
        return "nothing"
    return f"{str(val.dtype).removeprefix('torch.')}[{', '.join(map(str, val.shape))}]"
