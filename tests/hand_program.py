"""`Hand`: programs placed node by node, for tests of what no tracer would make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from zerofx.ir import ops
from zerofx.ir.facts import Facts, Role, facts, set_facts
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region


class Hand:
    """Places nodes one by one, with fake values and facts."""

    def __init__(
        self, params: Mapping[str, ParamSpec], region: Region = Region.FORWARD, stage: int = 3
    ) -> None:
        self.graph = fx.Graph()
        self.params, self.region, self.stage = params, region, stage
        self.buffers: dict[str, int] = {}
        self._fake = FakeTensorMode()

    def input(self, name: str, *shape: int, role: Role = Role.COMPUTE, param: str = "") -> fx.Node:
        node = self.graph.placeholder(name)
        with self._fake:
            node.meta["val"] = torch.empty(shape, dtype=torch.float64)
        set_facts(node, Facts(role, param))
        return node

    def buffer(self, name: str, param: str, *shape: int, layout: int = 1) -> fx.Node:
        self.buffers[param] = layout
        return self.input(name, *shape, role=Role.BUFFER, param=param)

    def shard(self, param: str) -> fx.Node:
        spec = self.params[param]
        name = f"shard_{param.replace('.', '_')}"
        node = self.input(name, *spec.shard_shape(0), role=Role.SHARD, param=param)
        set_facts(node, Facts(Role.SHARD, param, layout=spec.layout.name))
        return node

    def call(self, op: Any, *args: Any, role: Role = Role.COMPUTE, param: str = "") -> fx.Node:
        node = self.graph.call_function(op, args)
        values = fx.node.map_arg(args, lambda arg: arg.meta["val"])
        with self._fake:
            node.meta["val"] = op(*values)
        layout = self.params[param].layout.name if param else ""
        module = param.rpartition(".")[0]
        set_facts(node, Facts(role, param, module, layout))
        return node

    def unshard(self, shard: fx.Node) -> fx.Node:
        return self._param_call(ops.UNSHARD, Role.FULL, shard)

    def start(self, *shards: fx.Node) -> fx.Node:
        specs = [self.params[facts(shard).param] for shard in shards]
        names = tuple(spec.name for spec in specs)
        handle = specs[0].layout.handle
        param = names[0] if len(names) == 1 else ""
        node = self.call(ops.UNSHARD_START, list(shards), handle, role=Role.UNSHARD, param=param)
        set_facts(node, dataclasses.replace(facts(node), members=names))
        return node

    def wait(self, start: fx.Node, shard: fx.Node | None = None) -> fx.Node:
        member = shard if shard is not None else ops.members(start)[0]
        spec = self.params[facts(member).param]
        args = (start, member, list(spec.shape))
        return self.call(ops.UNSHARD_WAIT, *args, role=Role.FULL, param=spec.name)

    def gather(self, shard: fx.Node) -> fx.Node:
        return self.wait(self.start(shard))

    def free(self, full: fx.Node) -> fx.Node:
        spec = self.params[facts(full).param]
        return self.call(ops.FREE, full, spec.layout.handle, role=Role.FREE, param=spec.name)

    def reduce(self, grad: fx.Node, shard: fx.Node) -> fx.Node:
        spec = self.params[facts(shard).param]
        handle = spec.layout.handle
        return self.call(ops.REDUCE_GRAD, grad, shard, handle, role=Role.REDUCE, param=spec.name)

    def reduced(self, grad: fx.Node, shard: fx.Node) -> fx.Node:
        """Start and wait of a reduction."""
        start, param = self.reduction(grad, shard), facts(shard).param
        return self.call(ops.REDUCE_WAIT, start, shard, role=Role.GRAD, param=param)

    def reduction(self, grad: fx.Node, shard: fx.Node) -> fx.Node:
        """Start of a reduction."""
        spec = self.params[facts(shard).param]
        args = ([grad], [shard], spec.layout.handle)
        start = self.call(ops.REDUCE_START, *args, role=Role.REDUCE, param=spec.name)
        set_facts(start, dataclasses.replace(facts(start), members=(spec.name,)))
        return start

    def program(self, outputs: Sequence[Any], num_user_outputs: int | None = None) -> Program:
        self.graph.output(tuple(outputs))
        number = len(outputs) if num_user_outputs is None else num_user_outputs
        module = fx.GraphModule({}, self.graph)
        return Program(self.region, module, self.params, self.stage, number, buffers=self.buffers)

    def _param_call(self, op: Any, role: Role, shard: fx.Node) -> fx.Node:
        spec = self.params[facts(shard).param]
        cast = () if spec.cast is None else (spec.cast,)
        args = (shard, list(spec.shape), spec.layout.handle, *cast)
        return self.call(op, *args, role=role, param=spec.name)
