"""Everything that a program holds, by name: what it is, how large, from which node until which."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import fx

from zerofx.cost.comm import Algorithms
from zerofx.cost.liveness import NOTHING_HELD, Held, Ledger
from zerofx.ir.codes import values_from
from zerofx.ir.facts import facts
from zerofx.ir.ops import FREE, STARTS, UNSHARD_WAIT, is_call, started_by, waits_of
from zerofx.ir.program import Program
from zerofx.ir.view import is_getitem, positions

Kind = Literal["activations", "gradients", "messages", "gathered"]
KINDS: tuple[Kind, ...] = ("activations", "gradients", "messages", "gathered")
"""In the order of the columns of `zerofx.cost.curve.Curve`."""


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """One piece of memory.

    Attributes:
        kind: activations (inputs included), gradients full or reduced, buffers of collectives
            under way, or gathered values.
        node: what made it; `None` for what forward left and this program does not read.
        param: the parameter of a gathered value or a reduced gradient; else empty.
        num_bytes: its size.
        begin: place in execution order of the first node at which it lives.
        end: of the last one.
    """

    kind: Kind
    node: fx.Node | None
    param: str
    num_bytes: int
    begin: int
    end: int


def lifetimes(
    program: Program, algorithms: Algorithms, *, fused: bool, before: Held = NOTHING_HELD
) -> list[Lifetime]:
    """All memory of a program that went through all passes, parameters at rest excepted.

    The arguments are those of `zerofx.cost.liveness.live_bytes`, and the sums are its curve.
    """
    place = positions(program.graph)
    ledger = Ledger(program, algorithms, fused, before)
    found = [
        *_values(ledger, place),
        *_collectives(program, ledger, place),
        *_left(program, ledger, before, place),
    ]
    return [each for each in found if each.num_bytes]


def live_at_each_node(lives: Iterable[Lifetime], num_nodes: int) -> NDArray[np.int64]:
    """Bytes by kind at each node; int64 `[num_nodes, 4]`, columns as in `KINDS`."""
    change = np.zeros((num_nodes + 1, len(KINDS)), dtype=np.int64)
    for each in lives:
        column = KINDS.index(each.kind)
        change[each.begin, column] += each.num_bytes
        change[each.end + 1, column] -= each.num_bytes
    return change.cumsum(axis=0)[:-1]


def _values(ledger: Ledger, place: dict[fx.Node, int]) -> Iterator[Lifetime]:
    """What nodes make, and inputs."""
    of_grads = ledger.owners_of_gradients()
    death = {owner: place[node] for node, dead in ledger.deaths().items() for owner in dead}
    for owner, size in ledger.size.items():
        kind: Kind = "gradients" if owner in of_grads else "activations"
        maker = owner.all_input_nodes[0] if is_getitem(owner) else owner
        born = 0 if owner.op == "placeholder" else place[maker]
        yield Lifetime(kind, owner, "", size, born, death.get(owner, len(place) - 1))


def _collectives(program: Program, ledger: Ledger, place: dict[fx.Node, int]) -> Iterator[Lifetime]:
    """Buffers of collectives, what gathers fetch and what reductions leave."""
    last = len(place) - 1
    frees: dict[tuple[fx.Node, str], fx.Node] = {}
    for free in program.calls(FREE):
        full = free.all_input_nodes[0]
        if is_call(full, UNSHARD_WAIT):
            frees[started_by(full), facts(full).param] = free
    for start in program.calls(*STARTS):
        begin, waits = place[start], waits_of(start)
        until = place[waits[0]] if waits else last
        yield Lifetime("messages", start, "", ledger.message_at(start), begin, until)
        here = values_from(start)
        for spec, size in ledger.gathered_at(here):
            free = frees.get((start, spec.name))
            end = place[free] if free is not None else last
            yield Lifetime("gathered", start, spec.name, size, place[here], end)
        for spec, size in ledger.reduced_at(start):
            yield Lifetime("gradients", start, spec.name, size, begin, last)


def _left(
    program: Program, ledger: Ledger, before: Held, place: dict[fx.Node, int]
) -> Iterator[Lifetime]:
    """What forward left: values that nothing here reads, and gathered ones until their free."""
    last = len(place) - 1
    yield Lifetime("activations", None, "", ledger.unread_bytes(), 0, last)
    freed = {facts(free).param: place[free] for free in program.calls(FREE)}
    for name, size in sorted(before.kept.items()):
        if name in program.params:
            yield Lifetime("gathered", None, name, size, 0, freed.get(name, last))


def live_at(lives: Sequence[Lifetime], place: int) -> list[Lifetime]:
    """What lives at the node with this place in execution order, largest first."""
    found = [each for each in lives if each.begin <= place <= each.end]
    return sorted(found, key=lambda each: -each.num_bytes)
