"""Compile a segment: Inductor, or op by op."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from zerofx.frontend.segments import Segment
from zerofx.torch_private import compile_with_inductor, run_boxed

Boxed = Callable[[list[Any]], Any]
"""Takes its inputs in a list, which it empties; returns a sequence of outputs."""


@dataclasses.dataclass
class SegmentCompiler:
    """Compiles each distinct segment once.

    Attributes:
        inner: `inductor` or `eager`.
        patches: Inductor configuration, from `mode=`.
        num_compiled: distinct segments compiled so far.
        num_shared: segments that reused one.
    """

    inner: str
    patches: dict[str, Any]
    num_compiled: int = 0
    num_shared: int = 0
    _known: dict[tuple[str, bool], Boxed] = dataclasses.field(default_factory=dict)

    def compile(self, segment: Segment, *, is_backward: bool) -> Boxed:
        """The segment as a boxed callable."""
        if self.inner == "eager" or segment.only_views:
            return run_boxed(segment.module)
        key = (segment.key, is_backward)
        if key in self._known:
            self.num_shared += 1
        else:
            self._known[key] = self._inductor(segment.module, is_backward)
            self.num_compiled += 1
        return self._known[key]

    def _inductor(self, module: fx.GraphModule, is_backward: bool) -> Boxed:
        # Outputs cross to nodes that were traced with these strides.
        output = module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # pyright: ignore
        values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        return compile_with_inductor(module, values, is_backward, self.patches)
