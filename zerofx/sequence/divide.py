"""From a program of whole sequences to one of this rank's positions.

Dynamo's graph says what every value is as a whole. Node by node it is decided what a rank
computes: its part, if a rule allows it, else everything, of gathered operands. Collectives have
their adjoints as gradients. So each rank gets the gradient of the sum of all ranks' losses, which
are the same loss, by its own copy of the parameters; the mean over ranks is the gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx

from zerofx.errors import UnsupportedError
from zerofx.sequence.cuts import Cut, Place
from zerofx.sequence.graph import Editor
from zerofx.sequence.operations import (
    Kernels,
    kernels_of,
    may_write,
    name_of,
)
from zerofx.sequence.rules import divide_node
from zerofx.torch_private import (
    fake_mode,
    is_checkpoint_call,
    memory_of,
    of_first,
    tensors_in,
)

_log = logging.getLogger(__name__)


def divide(module: fx.GraphModule, dims: Mapping[int, int], place: Place) -> dict[int, Cut]:
    """Let a graph compute this rank's part of its sequences, in place.

    Args:
        module: Dynamo's graph.
        dims: the sequence dimension of marked inputs, by position.
        place: of this rank.

    Returns:
        How outputs that are parts are cut, by position.

    Raises:
        UnsupportedError: a sequence cannot be cut, or an operation cannot be divided; it is named.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    for node in inputs:
        if isinstance(size := node.meta.get("example_value"), torch.SymInt):
            int(size)  # every length has a program of its own
    division = _Division(Editor(module, place, fake_mode()))
    division.mark({inputs[position]: dim for position, dim in dims.items()})
    try:
        outputs = division.run()
    finally:
        division.close()
    if (wholes := division.at.wholes) and place.rank == 0:
        _log.warning(
            "these operations are given whole sequences, on every rank of one: %s",
            ", ".join(f"{name} of {path}" if path else name for name, path in wholes),
        )
    return {at: cut for at, cut in enumerate(outputs) if cut is not None}


class _Division:
    """Of one graph, or of the body of a checkpoint inside it."""

    def __init__(self, at: Editor, outer: _Division | None = None) -> None:
        self.at = at
        self._autocasts: list[torch.autocast] = [] if outer is None else outer._autocasts
        self._bodies: dict[fx.GraphModule, Any] = {}
        self._parts: dict[fx.Node, fx.Node] = {}
        self._written_to: set[fx.Node] = set()

    def mark(self, dims: Mapping[fx.Node, int]) -> None:
        """Cut inputs."""
        for node, dim in dims.items():
            length, size = self.at.shape(node)[dim], self.at.place.size
            if length % size or length < 2 * size:
                raise UnsupportedError(
                    f"sequence_parallel={size}: {node.name} has {length} positions",
                    f"pad sequences to a multiple of {size}, and at least {2 * size} positions",
                )
            self._parts[node] = self.at.sliced(node, Cut(dim))

    def run(self) -> tuple[Any, ...]:
        """How the outputs are cut."""
        made = set(self._parts.values())
        for node in list(self.at.graph.nodes):
            if node.op in ("call_function", "call_method") and node not in made:
                arguments = (node.args, node.kwargs)
                node.args, node.kwargs = fx.map_arg(arguments, lambda n: self._parts.get(n, n))
                self.at.here = node
                self._divide(node)
        self.at.module.recompile()
        return tuple(self.at.cuts.get(each) for each in self.outputs)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the graph returns."""
        return cast("tuple[Any, ...]", self.at.graph.output_node().args[0])

    def close(self) -> None:
        """Leave what the program did not: an error stopped it."""
        while self._autocasts:
            self._autocasts.pop().__exit__(None, None, None)

    def _divide(self, node: fx.Node) -> None:
        at, name = self.at, name_of(node)
        source = node.args[0] if node.args else None
        if getattr(node.target, "__name__", "") == "_enter_autocast":
            self._autocasts.append(torch.autocast(*cast("tuple[Any, ...]", node.args)))
            self._autocasts[-1].__enter__()
        elif getattr(node.target, "__name__", "") == "_exit_autocast":
            self._autocasts.pop().__exit__(None, None, None)
        elif is_checkpoint_call(node):
            self._divide_body(node)
        elif name == "as_strided":
            raise at.refusal(node, "depends on how a whole value lies in memory")
        elif not any(each in at.cuts for each in node.all_input_nodes):
            self._compute_whole(node, name)
        elif name == "getitem" and not isinstance(at.value(cast(fx.Node, source)), Tensor):
            cut: Any = at.cuts[cast(fx.Node, source)]
            self._enter(node, cut[cast(int, node.args[1])] if isinstance(cut, tuple) else cut)
        else:
            self._divide_operation(node, name)

    def _divide_operation(self, node: fx.Node, name: str) -> None:
        at, kernels = self.at, self._kernels(node)
        if kernels is not None and kernels.is_seen_otherwise:
            raise at.refusal(node, "gives a value another shape in place")
        written = self._written(node, name, kernels)
        are_cut = [each in at.cuts for each in written]
        if all(are_cut) and (done := divide_node(at, node, kernels)) is not None:
            self._enter(*done)
            if written:
                at.forget()
        elif any(are_cut):
            raise at.refusal(node, "writes in place, or may do so, to what ranks hold in parts")
        else:
            for each in node.all_input_nodes:
                node.replace_input_with(each, at.gathered(each))
            self._share_random(node, name, kernels, written)

    def _compute_whole(self, node: fx.Node, name: str) -> None:
        """Of operands that all ranks hold whole."""
        is_asked = name or any(map(self.at.apart, node.all_input_nodes))
        kernels = self._kernels(node) if is_asked else None
        if kernels is None and not name and not hasattr(node.target, "overloadpacket"):
            self.at.forget()
            return  # graphs inside this one, which write to nothing of it
        self._share_random(node, name, kernels, self._written(node, name, kernels))

    def _written(self, node: fx.Node, name: str, kernels: Kernels | None) -> list[fx.Node]:
        """What an operation writes to, or may write to for all that is known of it.

        Raises:
            UnsupportedError: such a write is not what it is in the program of wholes.
        """
        at = self.at
        if not may_write(node, name, kernels):
            return []
        found = node.all_input_nodes
        if kernels is not None and kernels.written:
            operands = at.operands(node)
            found = [operands[place] for place in kernels.written]
        self._write(node, found)
        return found

    def _write(self, node: fx.Node, written: list[fx.Node]) -> None:
        at = self.at
        if any(map(at.apart, written)):
            raise at.refusal(
                node,
                "writes in place to what ranks hold in parts, and in copies",
                "compute a new value instead, as by torch.where or torch.cat",
            )
        self._written_to.update(written)

    def _divide_body(self, node: fx.Node) -> None:
        """Of a checkpoint: its inputs are cut as they are here."""
        at = self.at
        body = getattr(at.module, str(cast(fx.Node, node.args[0]).target))
        operands = cast("tuple[fx.Node, ...]", node.args[1:])
        if body in self._bodies:
            raise at.refusal(node, "runs a checkpointed function that was divided before")
        inner = self._bodies[body] = _Division(Editor(body, at.place, at.mode), self)
        inputs = body.graph.find_nodes(op="placeholder")
        for given, operand in zip(inputs, operands, strict=True):
            inner.at.values[given] = at.value(operand) if isinstance(operand, fx.Node) else operand
            if operand in at.cuts:
                inner.at.cuts[given] = at.cuts[operand]
        cuts = inner.run()
        reached = {own for each in inner._written_to for own in inner.at.alike(each)}
        written = [each for own, each in zip(inputs, operands, strict=True) if own in reached]
        if written:
            self._write(node, written)
            at.forget()
        at.wholes |= inner.at.wholes
        at.values[node] = tuple(
            inner.at.value(each) if isinstance(each, fx.Node) else each for each in inner.outputs
        )
        if any(cut is not None for cut in cuts):
            at.cuts[node] = cuts

    def _enter(self, node: fx.Node, cut: Cut | None) -> None:
        """Compute a node on fake values: are they what the rule says?"""
        at = self.at
        if wrong := at.unlike(node, cut):
            raise at.refusal(node, wrong, "report this")
        node.meta["example_value"] = at.values[node]
        if cut is not None:
            at.cuts[node] = cut

    def _kernels(self, node: fx.Node) -> Kernels | None:
        return kernels_of(node, lambda: self.at.concrete(node, {}), self.at.mode)

    def _share_random(
        self, node: fx.Node, name: str, kernels: Kernels | None, written: list[fx.Node]
    ) -> None:
        """Let the ranks of a sequence draw the same for what they all hold whole."""
        at = self.at
        if written:
            at.forget()
        if kernels is None or not kernels.is_random:
            return
        size, group = at.place.size, at.place.group
        if name == "dropout":
            (source,) = at.operands(node)
            at.set_operands(node, [at.before(torch.ones_like, (source,))])
            drawn = at.after(node, of_first, lambda value: (value, group, size))
            drawn = at.after(drawn, torch.mul, lambda value: (value, source))
        elif not self._is_plain_draw(node, written):
            raise at.refusal(
                node,
                "draws random numbers for what each rank of a sequence holds whole",
                "let it see the sequence, draw by torch.rand or torch.bernoulli, or use F.dropout; "
                "of nn.MultiheadAttention leave dropout out, or call scaled_dot_product_attention",
            )
        else:
            drawn = at.after(node, of_first, lambda value: (value, group, size))
        if written:  # by each rank for itself
            at.after(drawn, torch.Tensor.copy_, lambda value: (written[0], value))

    def _is_plain_draw(self, node: fx.Node, written: list[fx.Node]) -> bool:
        """Whether nothing has a gradient, and at most the result is written to."""
        result = self.at.example(node)
        where = {memory_of(self.at.example(each)) for each in written}
        differentiable = any(each.requires_grad for each in tensors_in(result))
        return not differentiable and where <= {memory_of(result)}
