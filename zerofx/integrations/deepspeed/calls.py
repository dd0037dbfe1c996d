"""A process group's operations in a trace of torch's profiler, and tables of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from zerofx.integrations.deepspeed.modules import aligned

_ITEMSIZES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "byte": 1, "char": 1, "short": 2, "int": 4,
    "long": 8, "bool": 1, "unsigned char": 1, "signed char": 1, "long int": 8, "short int": 2,
    "complex<float>": 8, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
_OTHER_NAMES = {
    "allgather": "all_gather",
    "allgather_into": "all_gather",
    "all_gather_into": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_allv": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")
KNOWN = frozenset(
    (*_COLLECTIVES, "all_reduce", "send", "recv", "broadcast", "reduce", "gather", "scatter")
) | {"barrier"}
"""Plain names of operations."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation.

    Attributes:
        operation: its plain name.
        num_bytes: what this rank puts in; of a `recv`, what it gets.
        milliseconds: from its start to its end.
        ranks: those of the group.
    """

    operation: str
    num_bytes: int
    milliseconds: float
    ranks: int

    @property
    def bandwidths(self) -> tuple[float, float]:
        """Gbit/s of the algorithm, and of the links that it needs; DeepSpeed's formulas.

        But for a reduce-scatter, whose message counts once: DeepSpeed multiplies it by the ranks.
        """
        n, moved = self.ranks, self.num_bytes
        speed = 8 * moved / 1e6 / self.milliseconds if self.milliseconds else 0.0
        if self.operation == "all_gather":
            speed *= n
        if self.operation in _COLLECTIVES:
            return speed, speed * (n - 1) / n
        if self.operation == "all_reduce":
            return 2 * speed, 2 * speed * (n - 1) / n
        return speed, speed


def plain_name(name: str) -> str:
    """One name for what torch's functions, c10d, gloo and NCCL call differently."""
    short = re.sub(r"(_base|_tensor|_single|_coalesced|_object|_list)*$", "", name.strip("_"))
    return _OTHER_NAMES.get(short, short)


def calls_in(events: Iterable[dict[str, Any]], ranks: int) -> list[Call]:
    """The operations of a trace, in order of their start.

    gloo tells of them on the host, in the names of what it carries out: it reduces and scatters by
    an all-reduce. NCCL's kernels bear what they carry out.

    Args:
        events: of a Chrome trace.
        ranks: of a group whose size the trace does not know.
    """
    found: list[tuple[float, Call]] = []
    for event in events:
        args = event.get("args", {})
        name = event.get("name", "")
        if name.startswith("gloo:"):
            size, count = _host_bytes(args), ranks
            name = name.partition(":")[2]
        elif "Collective name" in args and event.get("cat") == "kernel":
            name, count = args["Collective name"], int(args.get("Group size", ranks))
            size = int(args.get("In msg nelems", 0)) * _itemsize(args.get("dtype", ""))
        else:
            continue
        call = Call(plain_name(name), size, event.get("dur", 0.0) / 1000, count)
        found.append((event["ts"], call))
    return [call for _, call in sorted(found, key=lambda pair: pair[0])]


def listing(calls: Sequence[Call]) -> list[str]:
    """A line for each call."""
    names = ("operation", "bytes", "ms", "algbw Gbit/s", "busbw Gbit/s")
    rows: list[tuple[str, ...]] = [names]
    for call in calls:
        speeds = (f"{each:.3f}" for each in call.bandwidths)
        rows.append((call.operation, f"{call.num_bytes:,}", f"{call.milliseconds:.3f}", *speeds))
    return [*aligned(rows, texts=(0,)), ""]


def table(calls: Sequence[Call]) -> list[str]:
    """A line for each operation and size; bandwidths are those of the mean time."""
    names = ("operation", "bytes", "count", "total ms", "mean ms", "algbw Gbit/s", "busbw Gbit/s")
    rows: list[tuple[str, ...]] = [names]
    kinds = sorted({(call.operation, call.num_bytes, call.ranks) for call in calls})
    for kind in kinds:
        alike = [c for c in calls if (c.operation, c.num_bytes, c.ranks) == kind]
        total = sum(call.milliseconds for call in alike)
        mean = dataclasses.replace(alike[0], milliseconds=total / len(alike))
        figures = (total, mean.milliseconds, *mean.bandwidths)
        rows.append(
            (kind[0], f"{kind[1]:,}", str(len(alike)), *(f"{figure:.3f}" for figure in figures))
        )
    return aligned(rows, texts=(0,))


def _host_bytes(args: dict[str, Any]) -> int:
    """Of all tensors that a host event was given; those of a list are nested."""
    total = 0
    for dims, kind in zip(args.get("Input Dims", ()), args.get("Input type", ()), strict=False):
        shapes = dims if dims and isinstance(dims[0], list) else [dims]
        total += sum(math.prod(shape) for shape in shapes) * _itemsize(kind)
    return total


def _itemsize(dtype: str) -> int:
    """Bytes of an element, by torch's C++ names: `float`, `c10::BFloat16`, `Long`."""
    name = dtype.rpartition("::")[2].lower()
    return 1 if name.startswith("float8") else _ITEMSIZES.get(name, 0)
