"""A program as a graph of aten calls and plain `torch.distributed`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from zerofx.errors import UnsupportedError
from zerofx.frontend import plain_codes, plain_ops
from zerofx.ir import ops
from zerofx.ir.codes import gather_kernels, reduction_kernels
from zerofx.ir.facts import facts
from zerofx.ir.parcels import Codec
from zerofx.ir.program import Program
from zerofx.ir.text import node_names
from zerofx.ir.view import owned_source
from zerofx.torch_private import arguments_by_name

_LARGEST_CONSTANT = 256
_VIEW = torch.ops.aten.view.default
# Most arguments that `plain_ops` knows the meaning of.
_NUM_ARGUMENTS: dict[Any, int] = {
    ops.UNSHARD_START: 4,
    ops.UNSHARD_WAIT: 4,
    ops.REDUCE_START: 4,
    ops.REDUCE_WAIT: 3,
    ops.FREE: 2,
    ops.KEEP: 3,
    ops.KEEP_SHARD: 3,
    ops.SYNC_BUFFERS: 2,
    ops.UNSHARD: 4,
    ops.REDUCE_GRAD: 3,
}
_COMMUNICATION = (
    plain_ops.unshard_start,
    plain_ops.unshard_wait,
    plain_ops.reduce_start,
    plain_ops.reduce_wait,
    plain_ops.free,
    plain_ops.keep,
    plain_ops.sync_buffers,
    plain_codes.unshard_codes,
    plain_codes.reduce_codes,
)
_TAKEN = vars(plain_ops).keys() | vars(plain_codes).keys()


class PlainGraph:
    """The graph with printed names, and functions of `plain_ops` in the place of zerofx nodes.

    Attributes:
        made: the graph.
        inputs: printed names of its inputs.
        constants: each as an assignment.
        modules: path of the module that each value comes from, by name.
        sends_codes: whether any collective does.
    """

    def __init__(self, program: Program) -> None:
        self.made = fx.Graph()
        self.inputs: list[str] = []
        self.constants: list[str] = []
        self.modules: dict[str, str] = {}
        self.sends_codes = False
        self._program = program
        self._copies: dict[fx.Node, fx.Node] = {}
        self._layouts: dict[Any, fx.Node] = {}
        names = node_names(program)
        for node in program.graph.nodes:
            _refuse_own_groups(node)
            if node.op != "output":
                self._copy(node, names[node])
        self.made.output(self._mapped(tuple(program.outputs)))

    def _copy(self, node: fx.Node, printed: str) -> None:
        name = re.sub(r"\W", "_", printed.replace("%", "v"))
        name += "_" * (name in _TAKEN)  # the gather of a module `start` hides no function
        target, args, kwargs = cast(Any, node.target), node.args, node.kwargs
        if node.op == "call_function" and target in _NUM_ARGUMENTS:
            target, args = self._communication(node)
            kwargs = {}
        elif node.op in ("placeholder", "get_attr"):
            target = name
        elif target is _VIEW and owned_source(node) is not None:
            # Other ranks may own fewer rows than this one.
            target, args = torch.ops.aten.alias.default, args[:1]
        elif target is _VIEW:
            # Kernels may give other strides than tracing does.
            target = torch.ops.aten.reshape.default
        copy = self.made.create_node(
            node.op, target, self._mapped(args), self._mapped(kwargs), name
        )
        self._copies[node] = copy
        if target not in _COMMUNICATION:
            self.modules[copy.name] = facts(node).module
        self._annotate(copy, node)
        if node.op == "placeholder":
            copy.target = copy.name
            self.inputs.append(printed)
        elif node.op == "get_attr":
            copy.target = copy.name
            self.constants.append(f"{copy.name}={self._constant(node)}")

    def _annotate(self, copy: fx.Node, node: fx.Node) -> None:
        """Let the code say dtype and shape, as on rank 0."""
        value, source = node.meta.get("val"), owned_source(node)
        if not isinstance(value, Tensor) or ops.is_start(node):
            return
        spec = self._program.spec(source) if source is not None else None
        copy.meta["val"] = value if spec is None else value.new_empty(spec.shard_shape(0))

    def _communication(self, node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        args, target = node.args, cast(Any, node.target)
        if len(args) > _NUM_ARGUMENTS[target]:
            raise _refused(node, f"{target} has no counterpart in plain torch.distributed")
        if ops.is_start(node) and ops.codecs(node):
            return self._codes(node)
        if target is ops.UNSHARD_START and "inside the node" in facts(node).exact:
            raise _refused(
                node, "backward gathers what forward decoded, which a file of its own does not have"
            )
        if target is ops.UNSHARD:
            return plain_ops.unshard, (*args[:2], self._layout(args[2]), *args[3:])
        if target is ops.REDUCE_GRAD:
            return plain_ops.reduce_grad, (args[0], self._layout(args[2]), node.meta["val"].dtype)
        if target is ops.UNSHARD_START:
            sizes = [wait.args[2] for wait in ops.waits_of(node)]
            return plain_ops.unshard_start, (args[0], sizes, self._layout(args[1]))
        if target is ops.REDUCE_START:
            return plain_ops.reduce_start, (args[0], self._layout(args[2]))
        if target in ops.WAITS:
            start = ops.started_by(node)
            member = ops.members(start).index(cast(fx.Node, args[1]))
            if target is ops.REDUCE_WAIT:
                return plain_ops.reduce_wait, (start, member, node.meta["val"].dtype)
            return plain_ops.unshard_wait, (start, member, *args[3:])
        if target is ops.SYNC_BUFFERS:
            return plain_ops.sync_buffers, (args[0],)
        return plain_ops.free if target is ops.FREE else plain_ops.keep, (args[0],)

    def _codes(self, node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A collective that sends codes; its kernels are a constant."""
        codecs = [Codec.parse(codec) for codec in ops.codecs(node)]
        if any(codec.rounding == "stochastic" or codec.feedback for codec in codecs):
            raise _refused(
                node,
                "codes that are rounded at random, or feed errors back, depend on what was sent "
                "before",
            )
        self.sends_codes = True
        gathers, name = ops.is_call(node, ops.UNSHARD_START), f"kernels_{len(self.constants)}"
        made = (gather_kernels if gathers else reduction_kernels)(self._program, node)
        self.constants.append(f"{name}={made!r}")
        kernels = self.made.create_node("get_attr", name, (), {}, name)
        if not gathers:
            return plain_codes.reduce_codes, (node.args[0], self._layout(node.args[2]), kernels)
        sizes = [wait.args[2] for wait in ops.waits_of(node)]
        return plain_codes.unshard_codes, (node.args[0], sizes, self._layout(node.args[1]), kernels)

    def _layout(self, handle: Any) -> fx.Node:
        if handle not in self._layouts:
            layouts = (spec.layout for spec in self._program.params.values())
            layout = next(each for each in layouts if each.handle == handle)
            name = layout.name.replace(".", "_")
            rounded = () if layout.reduce_dtype is None else (layout.reduce_dtype,)
            args = (layout.num_shards, layout.num_replicas, *rounded)
            self._layouts[handle] = self.made.create_node(
                "call_function", plain_ops.layout, args, {}, name
            )
        return self._layouts[handle]

    def _constant(self, node: fx.Node) -> str:
        value = operator.attrgetter(str(node.target))(self._program.module)
        if not isinstance(value, Tensor) or value.numel() > _LARGEST_CONSTANT:
            kind = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else "a subgraph"
            raise _refused(node, f"constant {node.target} is {kind}, which one file cannot hold")
        return f"torch.tensor({value.tolist()}, dtype={value.dtype}, device={value.device.type!r})"

    def _mapped(self, args: Any) -> Any:
        """Arguments of the new graph, on each rank's own device; nodes made for it stay."""

        def mapped(arg: Any) -> Any:
            if isinstance(arg, torch.device):
                return torch.device(arg.type)
            return self._copies.get(arg, arg) if isinstance(arg, fx.Node) else arg

        return map_aggregate(args, mapped)


def _refused(node: fx.Node, why: str) -> UnsupportedError:
    return UnsupportedError(why, "read the text of the program instead", [node.name])


def _refuse_own_groups(node: fx.Node) -> None:
    """Collectives that the model calls name their group: the file has that of all ranks only."""
    if not hasattr(node.target, "_schema"):
        return
    group = arguments_by_name(node.target, node.args, node.kwargs).get("group_name")
    world = dist.group.WORLD
    if group is not None and (world is None or group != world.group_name):
        raise _refused(node, f"{node.target} is over process group {group!r}, which is this run's")
