"""The one door through which graphs are edited.

It keeps `meta["val"]` right, writes `Facts`, and stamps the pass that made the edit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torch import Tensor, fx

from zerofx.ir.facts import Facts, facts, set_facts
from zerofx.ir.ops import fake_kernel
from zerofx.ir.program import Program
from zerofx.torch_private import fake_mode_of, same_shape


class Editor:
    """Edits `program` on behalf of the pass `origin`."""

    def __init__(self, program: Program, origin: str) -> None:
        self.program = program
        self.origin = origin
        self._fake_mode = fake_mode_of(node.meta.get("val") for node in program.graph.nodes)

    def call_before(
        self, anchor: fx.Node, op: Any, args: tuple[Any, ...], record: Facts
    ) -> fx.Node:
        """Insert a call of `op` before `anchor`; its value is computed on fake tensors."""
        with self.program.graph.inserting_before(anchor):
            return self._call(op, args, record)

    def call_after(self, anchor: fx.Node, op: Any, args: tuple[Any, ...], record: Facts) -> fx.Node:
        """Insert a call of `op` right after `anchor`."""
        with self.program.graph.inserting_after(anchor):
            return self._call(op, args, record)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every reader of `old` read `new`, and erase `old`."""
        old.replace_all_uses_with(new)
        self.erase(old)

    def set_input(self, node: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """Let `node` read `new` where it read `old`.

        Raises:
            ValueError: it does not read `old`, or `new` has another shape, dtype or device, so
                that values computed from it would be others than they say.
        """
        if old not in node.all_input_nodes:
            raise ValueError(f"{node} does not read {old}")
        if node.op != "output" and not _look_alike(old, new):
            was, found = _look(old), _look(new)
            raise ValueError(f"{node} reads {old}: {was}, which {new}: {found} cannot replace")
        node.replace_input_with(old, new)

    def erase(self, node: fx.Node) -> None:
        """Remove a node without readers."""
        self.program.graph.erase_node(node)

    def move_before(self, node: fx.Node, anchor: fx.Node) -> None:
        """Move `node` to right before `anchor`."""
        anchor.prepend(node)

    def move_after(self, node: fx.Node, anchor: fx.Node) -> None:
        """Move `node` to right after `anchor`."""
        anchor.append(node)

    def move_readers_after(self, node: fx.Node, anchor: fx.Node) -> fx.Node:
        """Let all that is computed from `node` follow `anchor`; returns the last of it."""
        queue = [node]
        while queue:
            for user in queue.pop(0).users:
                if user.op != "output":
                    self.move_after(user, anchor)
                    anchor = user
                    queue.append(user)
        return anchor

    def note(self, node: fx.Node, **changes: Any) -> None:
        """Change fields of a node's facts."""
        set_facts(node, dataclasses.replace(facts(node), **changes))

    def finish(self) -> None:
        """Check the graph."""
        self.program.graph.lint()

    def _call(self, op: Any, args: tuple[Any, ...], record: Facts) -> fx.Node:
        node = self.program.graph.call_function(op, args)
        set_facts(node, dataclasses.replace(record, origin=self.origin))
        values: Any = fx.map_arg(args, lambda arg: arg.meta.get("val"))
        with self._fake_mode or contextlib.nullcontext():
            node.meta["val"] = fake_kernel(op)(*values)
        return node


def _look_alike(one: fx.Node, other: fx.Node) -> bool:
    left, right = one.meta.get("val"), other.meta.get("val")
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        alike = left.dtype == right.dtype and left.device == right.device
        return alike and same_shape(left, right)
    return isinstance(left, Tensor) == isinstance(right, Tensor)


def _look(node: fx.Node) -> tuple[Any, ...] | None:
    """Shape, dtype and device of a tensor; `None` if the node is something else."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return tuple(value.shape), value.dtype, value.device
