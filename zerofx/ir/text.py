"""Print a program: one line per node, the same text on every run, rank and torch version.

Names say what a value is to ZeRO: `shard.w` is what this rank owns of the parameter `w`,
`unshard.w` a gather under way, `full.w` its result, `reduce.w` a reduction under way and `grad.w`
its result. Traced values are numbered: `%0`, `%1`. A further value of the same name gets `#1`.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from zerofx.ir import ops
from zerofx.ir.facts import NODE, Facts, Role, facts
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.ir.view import owned_source

_PREFIXES = {
    ops.UNSHARD: "full",
    ops.UNSHARD_START: "unshard",
    ops.UNSHARD_WAIT: "full",
    ops.REDUCE_GRAD: "grad",
    ops.REDUCE_START: "reduce",
    ops.REDUCE_WAIT: "grad",
}
_INPUT_PREFIXES = {
    Role.SHARD: "shard",
    Role.BUFFER: "buffer",
    Role.SAVED: "saved",
    Role.EFFECT: "effect",
    Role.FULL: "full",
    Role.GRAD: "tangent",
}
_DTYPES = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}
_REST = {Region.FORWARD: "save", Region.JOINT: "gradients"}


def print_program(program: Program) -> str:
    """The whole program as text, ending in a newline."""
    return _Printer(program).text()


def node_names(program: Program) -> Mapping[fx.Node, str]:
    """What the printer calls each node."""
    return _Printer(program).names


def node_lines(program: Program) -> Mapping[fx.Node, str]:
    """The line of each node but the output, without the notes behind it."""
    printer = _Printer(program)
    nodes = (node for node in program.graph.nodes if node.op != "output")
    return {node: printer.line(node).partition("  # ")[0] for node in nodes}


def diff(before: str, after: str) -> str:
    """What changed between two printed programs, as a unified diff; empty if nothing did."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=2
    )
    return "".join(f"{line}\n" for line in lines)


class _Printer:
    """Holds the names that one text gives to nodes and symbolic sizes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: dict[fx.Node, str] = {}
        self._symbols: dict[str, str] = {}
        self._layouts = {spec.layout.handle: spec.layout.name for spec in program.params.values()}
        self._name_all(program.graph.nodes)

    def text(self) -> str:
        """Header, one line per node, outputs."""
        region, stage = self.program.region.value, self.program.stage
        lines = [f"{region} program, stage {stage}"]
        specs = sorted(self.program.params.values(), key=lambda spec: spec.index)
        lines += [f"  {_param_line(spec)}" for spec in specs]
        lines += [self.line(node) for node in self.program.graph.nodes if node.op != "output"]
        return "\n".join(lines + self._output_lines()) + "\n"

    def _name_all(self, nodes: Iterable[fx.Node]) -> None:
        numbers: dict[str, int] = {}
        for node in nodes:
            stem = _stem(node)
            number = numbers.get(stem, 0)
            numbers[stem] = number + 1
            if stem == "%" or stem in ("input", "saved", "effect", "tangent", "constant"):
                joint = "" if stem == "%" else "."
                self.names[node] = f"{stem}{joint}{number}"
            else:
                self.names[node] = f"{stem}#{number}" if number else stem

    def line(self, node: fx.Node) -> str:
        """One node, with what is noted about it."""
        name, record = self.names[node], facts(node)
        if record.role is Role.MESH:
            return name
        typed = "" if ops.is_start(node) else self._value(node.meta.get("val"), self._owned(node))
        head = f"{name}: {typed}" if typed else name
        if node.op in ("placeholder", "get_attr"):
            body = head
        else:
            call = f"{operation(node.target)}({self._arguments(node)})"
            body = f"{head} = {call}" if typed or ops.is_start(node) else call
        notes = _notes(record, name, node.op == "placeholder")
        return f"{body}  # {notes}" if notes else body

    def _output_lines(self) -> list[str]:
        outputs, count = self.program.outputs, self.program.num_user_outputs
        word = _REST.get(self.program.region)
        if word is None:
            return [f"return {self._list(outputs) or 'nothing'}"]
        rest = [f"{word} {self._list(outputs[count:])}"] if outputs[count:] else []
        return [f"return {self._list(outputs[:count]) or 'nothing'}", *rest]

    def _arguments(self, node: fx.Node) -> str:
        layout_at = ops.LAYOUT_ARGUMENT.get(cast(Any, node.target), -1)
        args, owned = node.args, self._owned(node)
        if owned is not None and len(args) == 2 and isinstance(args[1], (list, tuple)):
            args = (args[0], list(owned))
        parts = [
            self._layout(node, arg) if place == layout_at else self._argument(arg)
            for place, arg in enumerate(args)
        ]
        parts += [f"{key}={self._argument(arg)}" for key, arg in node.kwargs.items()]
        return ", ".join(parts)

    def _owned(self, node: fx.Node) -> Sequence[int] | None:
        """The shape that rank 0 owns: the last ranks may own fewer rows."""
        source = owned_source(node)
        spec = self.program.spec(source) if source is not None else None
        return spec.shard_shape(0) if spec is not None else None

    def _layout(self, node: fx.Node, handle: Any) -> str:
        return facts(node).layout or self._layouts.get(handle, "world")

    def _argument(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, (list, tuple)):
            return f"[{self._list(cast(list[Any], arg))}]"
        if isinstance(arg, torch.dtype):
            return _dtype(arg)
        if isinstance(arg, torch.SymInt):
            return self._size(arg)
        if isinstance(arg, slice):
            part = cast("slice[Any, Any, Any]", arg)
            edges = (part.start, part.stop, part.step)
            return ":".join("" if edge is None else self._argument(edge) for edge in edges)
        if isinstance(arg, enum.Enum):
            return arg.name
        plain = (bool, int, float, complex, str, type(None))
        if isinstance(arg, plain):
            return repr(arg)
        if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
            return str(arg).removeprefix("torch.")
        return type(arg).__name__

    def _list(self, args: Iterable[Any]) -> str:
        return ", ".join(self._argument(arg) for arg in args)

    def _value(self, value: Any, shape: Sequence[int] | None = None) -> str:
        if value is None:
            return ""
        if isinstance(value, Tensor):
            sizes = value.shape if shape is None else shape
            return f"{_dtype(value.dtype)}[{', '.join(self._size(n) for n in sizes)}]"
        if isinstance(value, (list, tuple)):
            parts = (self._value(each) or "none" for each in cast(list[Any], value))
            return f"({', '.join(parts)})"
        if isinstance(value, (bool, int, float, torch.SymInt)):
            return self._size(value)
        return type(value).__name__

    def _size(self, size: Any) -> str:
        # torch numbers its symbols by a hash of where they come from, which differs by version.
        return re.sub(r"\b([a-z])\d+\b", self._symbol, str(size))

    def _symbol(self, match: re.Match[str]) -> str:
        letter = match.group(1)
        same = sum(name.startswith(letter) for name in self._symbols.values())
        return self._symbols.setdefault(match.group(), f"{letter}{same}")


def _stem(node: fx.Node) -> str:
    record = facts(node)
    about = record.bucket if ops.is_start(node) and record.bucket else record.param
    suffix = f".{about}" if about else ""
    if record.role is Role.MESH:
        return "mesh"
    if node.op == "placeholder":
        return _INPUT_PREFIXES.get(record.role, "input") + suffix
    if node.op in ("get_attr", "output"):
        return "constant" if node.op == "get_attr" else "output"
    prefix = _PREFIXES.get(cast(Any, node.target))
    if prefix is not None:
        return prefix + suffix
    if cast(Any, node.target) in ops.PROGRAM_OPS:
        return operation(node.target) + suffix
    # Values that a pass added take no number, so that a diff shows the pass and nothing else.
    return operation(node.target).partition(".")[0] + suffix if record.origin else "%"


def operation(target: Any) -> str:
    """What an FX node calls, by the name that programs show."""
    if isinstance(target, str):
        return target
    if hasattr(target, "_schema"):
        return re.sub(r"^(aten|prims|zerofx)\.", "", str(target).removesuffix(".default"))
    name: str = getattr(target, "__name__", type(target).__name__)
    return name


def _notes(record: Facts, name: str, shows_layout: bool) -> str:
    shown = {
        "param": "" if record.param and record.param in name else record.param,
        "layout": record.layout if shows_layout else "",
        "axis": record.axis if record.axis == NODE else "",
        "wire": f"{record.wire_bytes}B" if record.wire_bytes else "",
        "scales": f"{record.scale_bytes}B" if record.scale_bytes else "",
        "exact": f'"{record.exact}"' if record.exact else "",
        "module": record.module,
        "bucket": "" if record.bucket and record.bucket in name else record.bucket,
        "by": record.origin,
    }
    return " ".join(f"{key}={text}" for key, text in shown.items() if text)


def _param_line(spec: ParamSpec) -> str:
    frozen = "" if spec.trainable else ", frozen"
    tied = f", tied to {', '.join(spec.tied)}" if spec.tied else ""
    size = ", ".join(str(extent) for extent in spec.shape)
    full = f", full in {_dtype(spec.cast)}" if spec.cast else ""
    wire = spec.layout.reduce_dtype
    reduced = f", reduced in {_dtype(wire)}" if wire and spec.trainable else ""
    rest = spec.layout.grad_dtype
    held = f", gradient in {_dtype(rest)}" if rest and spec.trainable else ""
    head = f"param {spec.name}: {_dtype(spec.dtype)}[{size}] {spec.layout.name}"
    return head + frozen + full + reduced + held + tied


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    match = re.fullmatch(r"([a-z]+)(\d+)(\w*)", name)
    if match is None or match.group(1) not in _DTYPES:
        return name
    return _DTYPES[match.group(1)] + match.group(2) + match.group(3)
