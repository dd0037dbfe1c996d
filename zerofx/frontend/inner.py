"""Compile segments: Inductor, or op by op."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zerofx.config import ZeroConfig
from zerofx.errors import UnsupportedError
from zerofx.frontend.segments import Segment
from zerofx.torch_private import (
    compile_with_inductor,
    graph_module,
    in_turns,
    inductor_options_of_mode,
    records_cuda_graphs,
    run_boxed,
)

Boxed = Callable[[list[Any]], Any]
"""Takes its inputs in a list, which it empties; returns a sequence of outputs."""


@dataclasses.dataclass
class SegmentCompiler:
    """Compiles each distinct segment once.

    Attributes:
        inner: `inductor` or `eager`.
        patches: Inductor configuration, from `mode=`.
    """

    inner: str
    patches: dict[str, Any]
    _known: dict[str, Boxed] = dataclasses.field(default_factory=dict)

    def compile(self, segments: Sequence[Segment], *, is_backward: bool) -> list[Boxed]:
        """The segments as boxed callables; ranks on one machine share the work."""
        named = [(f"{is_backward} {self.patches}\n{each.key}", each) for each in segments]
        new = {name: each for name, each in named if name not in self._known}
        self._known |= in_turns(
            {
                name: functools.partial(self._inductor, each, is_backward)
                for name, each in new.items()
                if self._is_kernel(each)
            }
        )
        self._known |= {
            name: run_boxed(each.owner, _viewed_as_it_comes(each.graph))
            for name, each in new.items()
            if not self._is_kernel(each)
        }
        return [self._known[name] for name, _ in named]

    def _is_kernel(self, segment: Segment) -> bool:
        return self.inner != "eager" and not segment.only_views

    def _inductor(self, segment: Segment, is_backward: bool) -> Boxed:
        # Outputs cross to nodes that were traced with these strides.
        module = graph_module(segment.owner, segment.graph)
        output = module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # pyright: ignore
        values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        return compile_with_inductor(module, values, is_backward, self.patches)


def _viewed_as_it_comes(graph: fx.Graph) -> fx.Graph:
    """The graph with views that copy where they have to.

    Op by op, strides are those of torch's kernels: some (LayerNorm's and BatchNorm's of transposed
    values) differ from what was traced, and views that were possible then are not. Nothing writes
    through a view: graphs are functional.
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    return graph


def patches_of_mode(mode: str | None, config: ZeroConfig) -> dict[str, Any]:
    """What a `mode` of `torch.compile` sets in Inductor's configuration.

    Raises:
        UnsupportedError: the mode has no meaning here; or it, or Inductor's own setting, records
            CUDA graphs.
    """
    given = mode not in (None, "default")
    if config.inner == "eager":
        if given:
            problem = f'mode="{mode}" has no meaning with inner="eager"'
            raise UnsupportedError(problem, "leave one out")
        return {}
    try:
        patches = inductor_options_of_mode(mode) if given else {}
    except RuntimeError as error:
        remedy = 'use mode="max-autotune-no-cudagraphs" or no mode'
        raise UnsupportedError(f"torch knows no mode={mode!r}", remedy) from error
    if records_cuda_graphs(patches):
        asks = f'mode="{mode}"' if given else "torch._inductor.config.triton.cudagraphs"
        raise UnsupportedError(
            f"{asks} records CUDA graphs, which cannot hold collectives that run between segments",
            'use mode="max-autotune-no-cudagraphs" or no mode, and leave that setting off',
        )
    return patches
