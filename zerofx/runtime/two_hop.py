"""Gather and reduce-scatter in two hops, where nodes hold several ranks each.

A rank talks to the ranks of its own node, and to those of its own column: one on each node, with
the same place there. Each byte then crosses between nodes once, instead of once for every rank of
the other node; the bytes that a rank sends in all stay `(W - 1) / W` of the full size. The slow hop
between nodes overlaps with compute; the one inside the node runs where the collective starts
(reductions) or is waited for (gathers). ZeRO++'s qgZ (§3.3) reduces so, with quantization.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zerofx.runtime.comm import Comm
from zerofx.runtime.exchange import Gather, Reduction, gather_direct, landing, mean_of
from zerofx.runtime.mail import Mail
from zerofx.runtime.pending import Pending


def gather_two_hop(transfers: Sequence[Gather], comm: Comm, tag: int) -> Pending:
    """Chunks go to node and column; what came along the column is then forwarded in the node."""

    def forward(_: list[Tensor]) -> Pending:
        inside = Mail(comm, comm.node_peers)
        for number, each in enumerate(transfers):
            chunks = each.out.chunk(comm.size)
            for node in range(comm.num_nodes):
                if node != comm.node:
                    row = chunks[node * comm.node_size :][: comm.node_size] * comm.num_nodes
                    # A tag of its own: the same pair exchanges one message for each node.
                    place = (node + 1) * len(transfers) + number
                    inside.post([row[comm.column]] * comm.size, row, tag + place)
        return Pending([], inside.deliver())

    peers = comm.node_peers | comm.column_peers
    return gather_direct(transfers, comm, tag, peers).then(forward)


def reduce_two_hop(transfers: Sequence[Reduction], comm: Comm, tag: int) -> Pending:
    """Means inside the node for every rank of the column, then the mean along the column."""
    inside = Mail(comm, comm.node_peers)
    # For each transfer and node: what this node's ranks have for the column's rank there.
    received: list[list[list[Tensor]]] = []
    for number, each in enumerate(transfers):
        parts = each.parts()
        received.append([])
        for node in range(comm.num_nodes):
            row = parts[node * comm.node_size :][: comm.node_size]
            received[-1].append(landing(row[comm.column], comm.column, comm.node_size))
            place = node * len(transfers) + number
            inside.post(row * comm.num_nodes, received[-1][node] * comm.num_nodes, tag + place)

    def cross(_: list[Tensor]) -> Pending:
        mail = Mail(comm, comm.column_peers)
        columns: list[list[Tensor]] = []
        sent: list[Tensor] = []
        for number, nodes in enumerate(received):
            means = [mean_of(parts, comm.column) for parts in nodes]
            sent += means
            columns.append(landing(means[comm.node], comm.node, comm.num_nodes))
            mail.post(_by_rank(means, comm), _by_rank(columns[-1], comm), tag + number)
        received.clear()

        def finish(_: list[Tensor]) -> list[Tensor]:
            return [mean_of(parts, comm.node) for parts in columns]

        return Pending([], mail.deliver(), tuple(sent), (finish,))

    flats = tuple(each.flat for each in transfers)
    # The hop inside the node is short; the one between nodes overlaps with what follows.
    return Pending([], inside.deliver(), flats, (cross,), is_short=True)


def _by_rank(by_node: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    return [by_node[rank // comm.node_size] for rank in range(comm.size)]
