"""`Program`: one traced part of a training step, which passes transform in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from zerofx.ir import ops
from zerofx.ir.facts import NODE, Role, facts
from zerofx.ir.spec import ParamSpec, Region


@dataclasses.dataclass
class Program:
    """A graph and what it is about.

    Attributes:
        region: the part of the step.
        module: the FX graph, in execution order; edited only through `zerofx.ir.edit`.
        params: the parameters it touches, by name.
        stage: ZeRO stage, 0 to 3.
        num_user_outputs: outputs before those that are saved for backward (forward), or those
            that are no gradients (joint).
        read_later: of a forward program, the parameters that its backward reads again.
        gradients_of: for each output of a backward program the parameter whose gradient it is; ""
            for those of inputs.
        buffers: handles of the layouts that hold the buffers which follow rank 0's, by name.
    """

    region: Region
    module: fx.GraphModule
    params: Mapping[str, ParamSpec]
    stage: int
    num_user_outputs: int
    read_later: frozenset[str] = frozenset()
    gradients_of: tuple[str, ...] = ()
    buffers: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.module.graph

    @property
    def output(self) -> fx.Node:
        """The output node."""
        return self.graph.output_node()

    @property
    def outputs(self) -> list[Any]:
        """What the program returns: nodes and constants."""
        values = self.output.args[0]
        return list(values) if isinstance(values, (tuple, list)) else [values]

    @property
    def returned(self) -> list[Any]:
        """What leaves zerofx: the user's values, or gradients."""
        outputs = self.outputs
        return outputs if self.region is Region.BACKWARD else outputs[: self.num_user_outputs]

    def calls(self, *ops: Any) -> list[fx.Node]:
        """Nodes that call one of `ops`, in execution order."""
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target in ops]

    def with_role(self, role: Role) -> Iterator[fx.Node]:
        """Nodes of one role, in execution order."""
        return (node for node in self.graph.nodes if facts(node).role is role)

    def spec(self, node: fx.Node) -> ParamSpec | None:
        """The parameter that `node` concerns."""
        return self.params.get(facts(node).param)

    def bytes_across_nodes(self, start: fx.Node, sent_bytes: int | None = None) -> int:
        """Of the bytes that a rank sends in a collective, those that leave its node.

        Args:
            start: of the collective.
            sent_bytes: what it sends, if not all that it may: some members may be there.
        """
        record = facts(start)
        spec = next((self.params[name] for name in record.members if name in self.params), None)
        if spec is None or record.axis == NODE:
            return 0
        sent = record.wire_bytes if sent_bytes is None else sent_bytes
        if ops.codecs(start):
            return record.across_bytes * sent // max(1, record.wire_bytes)
        reduces = ops.is_call(start, ops.REDUCE_START)
        return spec.layout.sent_across(sent, reduces=reduces)

    def full_bytes(self, *nodes: fx.Node) -> int:
        """Bytes of full values, in the dtypes that their nodes have.

        Args:
            nodes: full values, or gradients, of parameters; what frees or keeps a full value; what
                gathers or reduces: all its members.
        """
        return sum(map(self._full_bytes, nodes))

    def _full_bytes(self, node: fx.Node) -> int:
        if ops.is_call(node, ops.UNSHARD_START):
            return self.full_bytes(*ops.waits_of(node))
        if ops.is_call(node, ops.REDUCE_START):
            specs = [self.params.get(name) for name in facts(node).members]
            pairs = zip(specs, ops.gradients(node), strict=False)
            return sum(_padded_bytes(spec, grad) for spec, grad in pairs)
        if ops.is_call(node, ops.FREE, ops.KEEP):
            return _padded_bytes(self.spec(node), node.all_input_nodes[0])
        return _padded_bytes(self.spec(node), node)


def _padded_bytes(spec: ParamSpec | None, value: fx.Node) -> int:
    fake = value.meta.get("val")
    if not isinstance(fake, Tensor):
        return spec.full_bytes if spec is not None else 0
    return (spec.padded_numel if spec is not None else int(fake.numel())) * fake.dtype.itemsize
