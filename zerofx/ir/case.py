"""What the rules of `zerofx.ir.rules` look at: one program, analysed once, in linear time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from zerofx.ir import ops
from zerofx.ir.border import Border
from zerofx.ir.codes import values_from
from zerofx.ir.facts import Role, facts
from zerofx.ir.meaning import Meanings
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.text import node_names
from zerofx.ir.view import aliased_inputs, is_impure, is_symbol, positions, written_inputs

Roots = tuple[fx.Node, ...]
_NONE: Roots = ()


class Offence(NamedTuple):
    """A node that breaks a rule, how, and the node whose parameter is meant if it is another."""

    node: fx.Node
    problem: str
    about: fx.Node | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A program under examination.

    Attributes:
        program: the program.
        done: names of the passes that ran on it.
        final: no pass follows.
        budget_bytes: most bytes of full values that may be live at once.
        meanings: what the program meant before the last pass.
        border: what the program was given and gave before the last pass.
    """

    program: Program
    done: frozenset[str] = frozenset()
    final: bool = False
    budget_bytes: int | None = None
    meanings: Meanings | None = None
    border: Border | None = None

    def name(self, node: fx.Node) -> str:
        """What the printer calls `node`."""
        return self._names[node]

    def calls(self, *targets: Any) -> list[fx.Node]:
        """Nodes that call one of `targets`, in execution order."""
        found = [node for target in targets for node in self._by_op.get(target, ())]
        return sorted(found, key=self.place.__getitem__) if len(targets) > 1 else found

    def read_until(self, node: fx.Node) -> int:
        """Place at which `node` has read its inputs: of a reduction, that of its last wait."""
        if not ops.is_call(node, ops.REDUCE_START):
            return self.place[node]
        return max((self.place[wait] for wait in ops.waits_of(node)), default=len(self.place))

    @functools.cached_property
    def place(self) -> dict[fx.Node, int]:
        """Place of each node in execution order."""
        return positions(self.program.graph)

    @functools.cached_property
    def writes(self) -> dict[fx.Node, list[fx.Node]]:
        """For each operation that writes, the inputs that it writes to."""
        return {node: written for node in self.place if (written := written_inputs(node))}

    @functools.cached_property
    def gathered(self) -> dict[fx.Node, None]:
        """Full values in memory that exists for them alone: neither resident nor replicated."""
        fulls = self.calls(ops.UNSHARD, ops.UNSHARD_WAIT) if self.program.stage == 3 else []
        return dict.fromkeys(node for node in fulls if self._is_temporary(node))

    @functools.cached_property
    def frees(self) -> dict[fx.Node, list[fx.Node]]:
        """For each value that is freed, or kept, the nodes that do so."""
        out: dict[fx.Node, list[fx.Node]] = {}
        for node in self.calls(ops.FREE, ops.KEEP):
            out.setdefault(node.all_input_nodes[0], []).append(node)
        return out

    @functools.cached_property
    def roots(self) -> dict[fx.Node, Roots]:
        """For each node the full values whose memory it may share; only nodes that share any.

        The shard of a replicated parameter is its full value.
        """
        out: dict[fx.Node, Roots] = {}
        for node in self.place:
            if ops.is_call(node, ops.UNSHARD, ops.UNSHARD_WAIT) or self._is_replicated(node):
                out[node] = (node,)
            elif any(source in out for source in node.all_input_nodes):
                shared = _union(out.get(source, _NONE) for source in aliased_inputs(node))
                if shared:
                    out[node] = shared
        return out

    def roots_read_by(self, node: fx.Node) -> Roots:
        """Full values whose memory `node` reads."""
        return _union(self.roots.get(source, _NONE) for source in node.all_input_nodes)

    @functools.cached_property
    def derived(self) -> dict[fx.Node, None]:
        """Values computed from gathered parameters and constants alone, without randomness."""
        constant: dict[fx.Node, None] = {}
        out: dict[fx.Node, None] = dict(self.gathered)
        for node in self.place:
            if node.op == "get_attr" or is_symbol(node):
                constant[node] = None
            elif node.op == "call_function" and node not in out and not is_impure(node):
                sources = node.all_input_nodes
                known = all(source in constant or source in out for source in sources)
                if known and any(source in out for source in sources):
                    out[node] = None
                elif known:
                    constant[node] = None
        return out

    @functools.cached_property
    def reductions(self) -> dict[fx.Node, Roots]:
        """For each node the nearest reductions on the way to it; gathering ends the way."""
        reducing = (ops.REDUCE_GRAD, ops.REDUCE_START)
        out: dict[fx.Node, Roots] = {}
        for node in self.place:
            if ops.is_call(node, *reducing):
                out[node] = (node,)
            elif not ops.is_call(node, ops.UNSHARD, ops.UNSHARD_WAIT):
                found = _union(out.get(source, _NONE) for source in node.all_input_nodes)
                if found and node.op != "output":
                    out[node] = found
        return out

    @functools.cached_property
    def reduced_as(self) -> dict[fx.Node, str]:
        """For each node behind a reduction the parameter that was reduced last on the way."""
        out: dict[fx.Node, str] = {}
        for node in self.place:
            if ops.is_call(node, ops.REDUCE_GRAD, ops.REDUCE_WAIT):
                out[node] = facts(node).param
            elif node.op == "call_function":
                params = {out[source] for source in node.all_input_nodes if source in out}
                if len(params) == 1:
                    out[node] = params.pop()
        return out

    @functools.cached_property
    def saved(self) -> list[fx.Node]:
        """What a forward program keeps for backward."""
        if self.program.region is not Region.FORWARD:
            return []
        return _nodes(self.program.outputs[self.program.num_user_outputs :])

    def peak(self) -> tuple[int, fx.Node | None]:
        """Most bytes of gathered values live at once, and the gather that reaches them.

        Where codes travel, values live from the first wait on, at which they are read.
        """
        changes: dict[fx.Node, int] = {}
        for full in self.gathered:
            if ops.is_call(full, ops.UNSHARD):
                continue
            here, size = values_from(ops.started_by(full)), self.program.full_bytes(full)
            changes[here] = changes.get(here, 0) + size
            for free in self.frees.get(full, ())[:1]:
                changes[free] = changes.get(free, 0) - size
        live, peak, where = 0, 0, None
        for node in self.place:
            live += changes.get(node, 0)
            if live > peak:
                peak, where = live, node
        return peak, where

    @functools.cached_property
    def _names(self) -> Mapping[fx.Node, str]:
        return node_names(self.program)

    @functools.cached_property
    def _by_op(self) -> dict[Any, list[fx.Node]]:
        out: dict[Any, list[fx.Node]] = {}
        for node in self.place:
            if node.op == "call_function":
                out.setdefault(node.target, []).append(node)
        return out

    def _is_replicated(self, node: fx.Node) -> bool:
        if node.op != "placeholder" or facts(node).role is not Role.SHARD:
            return False
        spec = self.program.spec(node)
        return spec is not None and not spec.layout.sharded

    def _is_temporary(self, full: fx.Node) -> bool:
        spec = self.program.spec(full)
        return spec is None or spec.layout.temporary


def gradients_by_input(joint: Program) -> Iterator[tuple[fx.Node, int]]:
    """Inputs of a joint program's forward part, each with the place of its gradient.

    AOTAutograd describes both: an input of several parts (a jagged tensor, say) may have as many
    gradients, or a single None. Programs made by hand have a gradient for each input, in order.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    described = joint.graph.output_node().meta.get("desc")
    if described is None:
        num_gradients = len(joint.outputs) - joint.num_user_outputs
        yield from zip(placeholders, range(num_gradients), strict=False)
        return
    inputs = {_part(node.meta["desc"]): node for node in placeholders}
    for place, desc in enumerate(described[joint.num_user_outputs :]):
        whole, attribute = _part(desc)
        if (node := inputs.get((getattr(whole, "grad_of", None), attribute))) is not None:
            yield node, place


def _part(desc: Any) -> tuple[Any, Any]:
    """What a description is of, and which attribute of a tensor of several parts."""
    return getattr(desc, "base", desc), getattr(desc, "attr", None)


def _union(parts: Iterable[Roots]) -> Roots:
    """Members of all parts, each once; the common cases of one part cost nothing."""
    found: Roots = _NONE
    for part in parts:
        if not found:
            found = part
        elif part and part is not found:
            found = tuple(dict.fromkeys((*found, *part)))
    return found


def _nodes(values: Sequence[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]
