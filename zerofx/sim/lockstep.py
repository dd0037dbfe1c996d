"""Lockstep: run a program for all ranks in one process; the referee of what passes mean.

Every node has one value per rank. Compute runs rank by rank; zerofx nodes, markers included, are
done here in plain arithmetic across the ranks. Nothing is shared with `zerofx.runtime`, so the two
can disagree.

Ranks of a two-axis mesh are numbered replica by replica: `rank = replica * num_shards + shard`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zerofx.errors import ZeroFxError
from zerofx.ir import ops
from zerofx.ir.facts import NODE, facts
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec
from zerofx.sim.codes import ErrorsByBucket, gather_codes, join_codes, mean_codes, split_codes
from zerofx.sim.memory import memory_address, poison
from zerofx.sim.shares import join_inside, keeps_shape, shards_of, split_inside

Secondary = dict[str, list[Tensor]]


class LockstepError(ZeroFxError):
    """A program did what no real rank could do, or what only works by luck."""


def run_lockstep(
    program: Program,
    inputs: Sequence[Sequence[Any]],
    world: int | None = None,
    secondary: Secondary | None = None,
    errors: ErrorsByBucket | None = None,
) -> list[list[Any]]:
    """Run `program` on all ranks.

    Args:
        program: in any form, from freshly traced to final. It was traced on rank 0.
        inputs: of each rank. Buffers that the program synchronises are written.
        world: number of ranks, to be checked against `inputs`.
        secondary: by parameter, the secondary shards of all ranks: a forward writes them, its
            backward gathers from them. Without, backward gathers the same values over all ranks.
        errors: what feedback keeps of coded gradients: a backward renews them, the next one adds
            them. Without, they begin at zero.

    Returns:
        The outputs of each rank.

    Raises:
        LockstepError: a collective is read before its wait, waited for twice or never; a value is
            read after its free, freed twice, or not one that may be freed; the inputs of a
            collective changed under way.
    """
    if world is not None and world != len(inputs):
        raise LockstepError(f"inputs of {len(inputs)} ranks for a world of {world}")
    secondary, errors = {} if secondary is None else secondary, {} if errors is None else errors
    return _Ranks(program, len(inputs), secondary, errors).run(inputs)


@dataclasses.dataclass
class _Pending:
    """A collective under way: of each member what each rank will get, and what was read for it."""

    values: dict[fx.Node, list[Tensor]]
    sources: list[Tensor]
    versions: list[int]
    left: set[fx.Node]


class _Ranks:
    """One run: the environment of all ranks."""

    def __init__(
        self, program: Program, world: int, secondary: Secondary, errors: ErrorsByBucket
    ) -> None:
        self.program, self.secondary, self.errors = program, secondary, errors
        self.world = world
        self.values: dict[fx.Node, list[Any]] = {}
        self.pending: dict[fx.Node, _Pending] = {}
        # Kept alive, so that no later value can get the address of a freed one.
        self.freed: dict[int, Tensor] = {}
        self.gathered: set[int] = set()
        self._handlers: dict[Any, Callable[[fx.Node], list[Any]]] = {
            ops.UNSHARD: self._unshard,
            ops.UNSHARD_START: self._unshard_start,
            ops.UNSHARD_WAIT: self._wait,
            ops.FREE: self._free,
            ops.KEEP: self._free,  # backward gathers the same values
            ops.KEEP_SHARD: self._keep_shard,
            ops.REDUCE_GRAD: self._reduce_grad,
            ops.REDUCE_START: self._reduce_start,
            ops.REDUCE_WAIT: self._wait,
            ops.SYNC_BUFFERS: self._sync_buffers,
        }

    @torch.no_grad()
    def run(self, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        feeds = [iter(values) for values in inputs]
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = [next(feed) for feed in feeds]
            elif node.op == "output":
                break
            elif node.op == "get_attr":
                self.values[node] = [operator.attrgetter(node.target)(self.program.module)] * (
                    self.world
                )
            else:
                self.values[node] = self._handlers.get(node.target, self._compute)(node)
        for node, pending in self.pending.items():
            if pending.left:
                raise self._error(node, "is never waited for", "insert its wait")
        outputs = self.program.output
        return [list(self._fill(outputs, self.program.outputs, r)) for r in range(self.world)]

    def _compute(self, node: fx.Node) -> list[Any]:
        return [self._compute_on(node, rank) for rank in range(self.world)]

    def _compute_on(self, node: fx.Node, rank: int) -> Any:
        args, kwargs = self._fill(node, (node.args, node.kwargs), rank)
        if node.op == "call_module":
            return self.program.module.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if keeps_shape(node):
            # Rank 0's shape is in the graph; other ranks' shards may have fewer rows.
            return args[0].view(args[0].shape)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _unshard(self, node: fx.Node) -> list[Tensor]:
        spec = self._spec(node, facts(node).param)
        shards = self._read(node, node.args[0])
        fulls = self._gather(node, spec, shards, ops.full_dtype(node))
        return [full.clone() for full in fulls]

    def _unshard_start(self, node: fx.Node) -> list[Any]:
        values: dict[fx.Node, list[Tensor]] = {}
        sources: list[Tensor] = []
        dtypes = {wait.args[1]: ops.full_dtype(wait) for wait in ops.waits_of(node)}
        for shard, name in zip(ops.members(node), facts(node).members, strict=True):
            shards, spec = self._read(node, shard), self._spec(node, name)
            if facts(node).axis == NODE and name in self.secondary and not ops.codecs(node):
                values[shard] = join_inside(self.secondary[name], spec)
            else:
                values[shard] = self._gather(node, spec, shards, dtypes.get(shard))
            sources += shards
        if ops.codecs(node):
            values = self._coded(node)
        return self._start(node, values, sources)

    def _coded(self, node: fx.Node) -> dict[fx.Node, list[Tensor]]:
        if facts(node).axis == NODE and self.secondary:
            return join_codes(self.program, node, self.secondary)
        shards = [self._read(node, shard) for shard in ops.members(node)]
        if ops.keeps_codes(node):
            self.secondary.update(split_codes(self.program, node, shards))
        return gather_codes(self.program, node, shards)

    def _reduce_grad(self, node: fx.Node) -> list[Tensor]:
        spec = self._spec(node, facts(node).param)
        grads, shards = self._read(node, node.args[0]), self._read(node, node.args[1])
        return [mean.to(shards[0].dtype) for mean in self._mean(node, spec, grads)]

    def _reduce_start(self, node: fx.Node) -> list[Any]:
        values: dict[fx.Node, list[Tensor]] = {}
        sources: list[Tensor] = []
        moved = zip(ops.gradients(node), ops.members(node), facts(node).members, strict=True)
        for grad, shard, name in moved:
            grads = self._read(node, grad)
            values[shard] = self._mean(node, self._spec(node, name), grads)
            sources += grads
        if ops.codecs(node):
            grads = [self._read(node, grad) for grad in ops.gradients(node)]
            shards = [self._read(node, shard) for shard in ops.members(node)]
            values = mean_codes(self.program, node, grads, shards, self.errors)
        return self._start(node, values, sources)

    def _start(
        self, node: fx.Node, values: dict[fx.Node, list[Tensor]], sources: list[Tensor]
    ) -> list[Any]:
        versions = [source._version for source in sources]
        pending = _Pending(values, sources, versions, set(values))
        self.pending[node] = pending
        return [pending] * self.world

    def _wait(self, node: fx.Node) -> list[Tensor]:
        start, shard = node.args[:2]
        pending = self.pending.get(start) if isinstance(start, fx.Node) else None
        if pending is None:
            raise self._error(node, "waits for something that was not started", "insert the start")
        if not isinstance(shard, fx.Node) or shard not in pending.values:
            raise self._error(node, "waits for no member of its bucket", "wait for a member")
        if shard not in pending.left:
            raise self._error(node, "waits a second time", "wait once")
        if [source._version for source in pending.sources] != pending.versions:
            raise self._error(node, "waits for what changed under way", "write after the wait")
        pending.left.discard(shard)
        values = pending.values[shard]
        spec = self._spec(node, facts(node).param)
        if ops.is_call(node, ops.UNSHARD_WAIT) and spec.layout.temporary:
            self.gathered.update(memory_address(value) for value in values)
        if ops.is_call(node, ops.REDUCE_WAIT):
            dtype = ops.grad_dtype(node) or self.values[shard][0].dtype
            return [value.to(dtype) for value in values]
        return values

    def _free(self, node: fx.Node) -> list[None]:
        for value in self._read(node, node.args[0]):
            address = memory_address(value)
            if not address:
                continue
            if address not in self.gathered:
                raise self._error(node, "frees what is not a gathered value", "drop the free")
            self.gathered.discard(address)
            poison(value)
            self.freed[address] = value
        return [None] * self.world

    def _keep_shard(self, node: fx.Node) -> list[None]:
        spec = self._spec(node, facts(node).param)
        self.secondary[spec.name] = split_inside(self._read(node, node.args[0]), spec)
        return [None] * self.world

    def _sync_buffers(self, node: fx.Node) -> list[None]:
        buffers = node.args[0]
        assert isinstance(buffers, (list, tuple))
        for buffer in buffers:
            first, *others = self._read(node, buffer)
            for other in others:
                other.copy_(first)
        return [None] * self.world

    def _gather(
        self, node: fx.Node, spec: ParamSpec, shards: list[Tensor], dtype: torch.dtype | None
    ) -> list[Tensor]:
        num = spec.layout.num_shards
        if dtype is not None:
            shards = [shard.to(dtype) for shard in shards]
        if not spec.layout.sharded:
            return shards
        for rank, shard in enumerate(shards):
            if shard.shape != spec.shard_shape(rank % num):
                wanted = tuple(spec.shard_shape(rank % num))
                raise self._error(
                    node, f"gathers {tuple(shard.shape)} from rank {rank}, not {wanted}", ""
                )
        starts = range(0, self.world, num)
        fulls = [torch.cat(shards[start : start + num]) for start in starts]
        return [fulls[rank // num].clone() for rank in range(self.world)]

    def _mean(self, node: fx.Node, spec: ParamSpec, grads: list[Tensor]) -> list[Tensor]:
        for grad in grads:
            if grad.shape != spec.shape:
                raise self._error(node, f"reduces a gradient of shape {tuple(grad.shape)}", "")
        wire = spec.layout.reduce_dtype or grads[0].dtype
        wide = torch.promote_types(wire, torch.float32)
        total = torch.stack([grad.to(wire).to(wide) for grad in grads]).sum(0)
        return shards_of((total / self.world).to(wire), spec)

    def _spec(self, node: fx.Node, param: str) -> ParamSpec:
        spec = self.program.params.get(param)
        if spec is None:
            raise self._error(node, "concerns no parameter of the program", "write its facts")
        layout = spec.layout
        if layout.num_ranks != self.world:
            raise self._error(node, f"has layout {layout.name}, not of {self.world} ranks", "")
        return spec

    def _read(self, reader: fx.Node, node: Any) -> list[Tensor]:
        return [self._fill(reader, node, rank) for rank in range(self.world)]

    def _fill(self, reader: fx.Node, args: Any, rank: int) -> Any:
        """`args` of `reader` with the values of one rank, each checked to be readable."""

        def value_of(node: fx.Node) -> Any:
            value = self.values[node][rank]
            if isinstance(value, _Pending):
                raise self._error(reader, f"reads {node.name} before its wait", "read the wait")
            if isinstance(value, Tensor) and memory_address(value) in self.freed:
                raise self._error(reader, f"reads {node.name} after its free", "free later")
            return value

        return map_arg(args, value_of)

    def _error(self, node: fx.Node, problem: str, remedy: str) -> LockstepError:
        param = facts(node).param
        named = f" of parameter {param}" if param else ""
        return LockstepError(f"node {node.name}{named} {problem}", remedy)
