"""What executing a program allocates, and the most of it that lives at once.

As `zerofx.runtime` allocates: values die after their last reader, views keep what they view, full
gradients live until their reduction is waited for, collectives take memory where small members are
packed or parts received. Gathered values are counted apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from torch import fx

from zerofx.cost.comm import Algorithms
from zerofx.cost.compute import value_bytes
from zerofx.cost.curve import CUT, Curve, Rows, note
from zerofx.cost.fusion import values_inside_kernels
from zerofx.cost.messages import is_copied, message_bytes
from zerofx.ir.codes import gather_at
from zerofx.ir.facts import Role, block_of, facts
from zerofx.ir.ops import (
    FREE,
    KEEP,
    PROGRAM_OPS,
    REDUCE_START,
    computes,
    gradients,
    is_call,
    is_start,
    is_wait,
    started_by,
    waits_of,
)
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.ir.view import aliased_inputs, is_getitem, positions


@dataclasses.dataclass(frozen=True)
class Held:
    """What a forward leaves behind.

    Attributes:
        values: bytes of each distinct piece of memory, by number.
        piece: which of them a saved value lies in, by name of its node.
        lasting: pieces that the caller holds until the step ends: the model's inputs and results.
        kept: bytes of the full values that stay, by the names of their parameters.
    """

    values: Mapping[int, int]
    piece: Mapping[str, int]
    lasting: frozenset[int]
    kept: Mapping[str, int]


NOTHING_HELD = Held({}, {}, frozenset(), {})
"""Before a forward."""


def live_bytes(
    program: Program,
    algorithms: Algorithms,
    *,
    fused: bool,
    before: Held = NOTHING_HELD,
    accumulates: bool = False,
) -> Curve:
    """What is live at each node of a program that went through all passes.

    Args:
        program: forward or backward, in execution order.
        algorithms: which calls move a bucket.
        fused: whether kernels are fused, as Inductor does.
        before: of a backward program, what forward left behind.
        accumulates: reduced gradients are added to those that are there, and not counted here.
    """
    return Ledger(program, algorithms, fused, before, accumulates=accumulates).walk()


def held_after(forward: Program, algorithms: Algorithms, *, fused: bool) -> Held:
    """What `forward` leaves for its backward, and for the caller."""
    ledger = Ledger(forward, algorithms, fused, NOTHING_HELD)
    number: dict[fx.Node, int] = {}
    piece: dict[str, int] = {}
    lasting: set[int] = set()
    returned = forward.outputs[: forward.num_user_outputs]
    inputs = forward.graph.find_nodes(op="placeholder")
    for value in (*inputs, *forward.outputs):
        for owner in ledger.owners[value] if isinstance(value, fx.Node) else ():
            if owner in ledger.size:
                place = number.setdefault(owner, len(number))
                piece[value.name] = place
                if owner.op == "placeholder" or value in returned:
                    lasting.add(place)
    kept = {facts(node).param: forward.full_bytes(node) for node in forward.calls(KEEP)}
    values = {place: ledger.size[owner] for owner, place in number.items()}
    return Held(values, piece, frozenset(lasting), kept)


class Ledger:
    """Sizes, owners and lifetimes of everything that a program allocates.

    Attributes:
        owners: the nodes whose memory a value lies in, or is computed from inside a kernel.
        size: bytes that a node allocates; nodes that allocate nothing are missing.
        first_of_piece: the first input that lies in a piece of what forward left.
    """

    def __init__(
        self,
        program: Program,
        algorithms: Algorithms,
        fused: bool,
        before: Held,
        *,
        accumulates: bool = False,
    ) -> None:
        self._program = program
        self._accumulates = accumulates
        self._algorithms = algorithms
        self._before = before
        self._place = positions(program.graph)
        self._inside = values_inside_kernels(program.graph) if fused else set[fx.Node]()
        self.first_of_piece: dict[int, fx.Node] = {}
        self.owners: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.size: dict[fx.Node, int] = {}
        for node in program.graph.nodes:
            self.owners[node] = (node,)
            if node.op == "placeholder":
                self._enter_input(node)
            elif computes(node):
                self._enter(node)

    def walk(self) -> Curve:
        """Add up over the program."""
        dies = self.deaths()
        of_grads = self.owners_of_gradients()
        kept = sum(self._before.kept.values())
        live = np.array([self.unread_bytes(), 0, 0, kept], dtype=np.int64)
        points, block = list[tuple[str, str, Rows]](), ""
        for node in self._program.graph.nodes:
            for owner in self._allocated_at(node):
                live[int(owner in of_grads)] += self.size[owner]
            live[1] += sum(size for _, size in self.reduced_at(node))
            live[2:] += (self.message_at(node), sum(size for _, size in self.gathered_at(node)))
            silent = node.target in PROGRAM_OPS or bool(aliased_inputs(node))
            if node.op != "placeholder":
                block = _block_of(node, block)
                note(points, CUT if silent else node.name, block, live)
            for owner in dies.get(node, ()):
                live[int(owner in of_grads)] -= self.size[owner]
            live[2:] -= (self._message_until(node), self._freed_at(node))
            if node.op != "placeholder" and not silent:
                points.append((node.name, block, live.copy()))
        names, blocks, rows = zip(*points, strict=True)
        return Curve(names, blocks, np.stack(rows))

    def owners_of_gradients(self) -> set[fx.Node]:
        """The nodes whose memory full gradients lie in."""
        starts = self._program.calls(REDUCE_START)
        return {o for start in starts for g in gradients(start) for o in self.owners[g]}

    def unread_bytes(self) -> int:
        """Of what forward left, what nothing here reads."""
        values, read = self._before.values, self.first_of_piece
        return sum(size for piece, size in values.items() if piece not in read)

    def _enter_input(self, node: fx.Node) -> None:
        place = self._before.piece.get(node.name)
        if place is not None:
            first = self.first_of_piece.setdefault(place, node)
            self.owners[node] = (first,)
            self.size[first] = self._before.values[place]
        elif facts(node).role not in (Role.SHARD, Role.BUFFER, Role.MESH):
            self.size[node] = value_bytes(node.meta.get("val"))

    def _enter(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        viewed = aliased_inputs(node)
        if is_getitem(node) and not aliased_inputs(node.all_input_nodes[0]):
            self.size[node] = value_bytes(value)  # outputs of one kernel live each on its own
        elif viewed or node in self._inside:
            sources = viewed[:1] or node.all_input_nodes
            found = dict.fromkeys(owner for each in sources for owner in self.owners[each])
            self.owners[node] = tuple(found)
        elif not (isinstance(value, (tuple, list)) and any(map(is_getitem, node.users))):
            self.size[node] = value_bytes(value)

    def _allocated_at(self, node: fx.Node) -> list[fx.Node]:
        """What gets memory when `node` runs: outputs of one kernel all at once."""
        if is_getitem(node):
            return []
        own = [node, *(user for user in node.users if is_getitem(user))]
        return [each for each in own if each in self.size]

    def deaths(self) -> dict[fx.Node, list[fx.Node]]:
        """What dies after each node."""
        last: dict[fx.Node, fx.Node] = {owner: owner for owner in self.size}
        for node in self._program.graph.nodes:
            for source in node.all_input_nodes:
                last.update((owner, node) for owner in self.owners[source])
        for start in self._program.calls(REDUCE_START):
            waits = waits_of(start)
            if any(map(_stays, self._specs(start))):
                waits = self._program.graph.find_nodes(op="output")
            pairs = zip(self._specs(start), gradients(start), strict=True)
            sent = [grad for spec, grad in pairs if not is_copied(spec, grad)]
            for owner in {o for grad in sent for o in self.owners[grad]}:
                last[owner] = max(last[owner], *waits[:1], key=self._place.__getitem__)
        dies: dict[fx.Node, list[fx.Node]] = {}
        for owner in self.size:
            if last[owner].op != "output" and not self._lasts(owner):
                dies.setdefault(last[owner], []).append(owner)
        return dies

    def _lasts(self, owner: fx.Node) -> bool:
        """Whether the caller holds it all the time."""
        forward = self._program.region is not Region.BACKWARD
        lasting = forward or self._before.piece.get(owner.name) in self._before.lasting
        return owner.op == "placeholder" and lasting

    def gathered_at(self, node: fx.Node) -> list[tuple[ParamSpec, int]]:
        """What a gather takes here for values, and bytes of each: codes become some at the wait."""
        start = gather_at(node)
        if start is None:
            return []
        found = [(self._program.spec(wait), wait) for wait in waits_of(start)]
        return [
            (spec, self._program.full_bytes(wait))
            for spec, wait in found
            if spec is not None and spec.layout.temporary and spec.name not in self._before.kept
        ]

    def _freed_at(self, node: fx.Node) -> int:
        return self._program.full_bytes(node) if is_call(node, FREE) else 0

    def reduced_at(self, node: fx.Node) -> list[tuple[ParamSpec, int]]:
        """Reduced gradients that a reduction allocates; they last until `zero_grad`."""
        if not is_call(node, REDUCE_START):
            return []
        specs = [spec for spec in self._specs(node) if not _stays(spec)]
        new = [s for s in specs if not (self._accumulates and s.layout.sharded)]
        return [(s, math.prod(s.shard_shape(0)) * s.grad_dtype.itemsize) for s in new]

    def message_at(self, node: fx.Node) -> int:
        """Bytes of buffers of the collective that starts here."""
        known = self._specs(node)
        return message_bytes(self._program, node, self._algorithms) if known else 0

    def _message_until(self, node: fx.Node) -> int:
        """Memory of the collective whose first wait this is."""
        if not is_wait(node):
            return 0
        start = started_by(node)
        return self.message_at(start) if waits_of(start)[0] is node else 0

    def _specs(self, node: fx.Node) -> list[ParamSpec]:
        params, starts = self._program.params, is_start(node)
        return [params[name] for name in facts(node).members if starts and name in params]


def _block_of(node: fx.Node, previous: str) -> str:
    """The outermost numbered module of a node; nodes of none lie where the one before does."""
    path = facts(node).module if node.target not in PROGRAM_OPS else ""
    return block_of(path) if path else previous


def _stays(spec: ParamSpec) -> bool:
    """Whether a gradient is its own mean, of one rank: no memory is taken, none is freed."""
    layout = spec.layout
    alone = layout.num_shards == layout.num_replicas == 1
    kinds = {spec.dtype, spec.full_dtype, layout.reduce_dtype or spec.dtype, spec.grad_dtype}
    return alone and len(kinds) == 1
