"""`Machine`: where a model trains, as far as predictions go."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from torch import fx

from zerofx.cost.comm import Algorithms, algorithms_for
from zerofx.cost.compute import Roofline
from zerofx.cost.host import NO_HOST, Host
from zerofx.cost.link import Link
from zerofx.cost.processor import Processor
from zerofx.cost.tables import MOST_BUCKET_BYTES, Collective, CommTable
from zerofx.ir.codes import kernels_at, specs_of
from zerofx.ir.facts import facts
from zerofx.ir.kernels import operand_bytes
from zerofx.ir.ops import (
    KEEP,
    REDUCE_START,
    UNSHARD_START,
    codecs,
    collective_of,
    is_call,
    waits_of,
)
from zerofx.ir.program import Program
from zerofx.ir.spec import Region

_LINKS = ("link", "reductions", "all_reduces", "all_to_alls")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where the model will train.

    Attributes:
        device: `cuda` or `cpu`: which collectives the runtime uses, and how an optimizer steps.
        roofline: of one device.
        link: between ranks.
        reductions: the same link, as reductions find it; by default `link`.
        all_reduces: as those of replicated parameters find it; by default `reductions`.
        all_to_alls: as those that send codes find it; by default `reductions`.
        measured: whether the links were measured there.
        host: of one rank.
        most_bucket_bytes: bound of buckets whose size was not asked for, by the latency there.
    """

    device: str
    roofline: Roofline
    link: Link
    reductions: Link | None = None
    all_reduces: Link | None = None
    all_to_alls: Link | None = None
    measured: bool = False
    host: Host = NO_HOST
    most_bucket_bytes: int = MOST_BUCKET_BYTES

    def with_link(self, link: Link) -> Machine:
        """The same where all collectives find that link, as somebody says."""
        other: dict[str, Any] = dict.fromkeys(_LINKS[1:])
        other["most_bucket_bytes"] = MOST_BUCKET_BYTES
        return dataclasses.replace(self, link=link, measured=False, **other)

    @property
    def links(self) -> dict[Collective, Link]:
        """The link as each collective finds it."""
        reductions = self.reductions or self.link
        return {
            "all_gather": self.link,
            "reduce_scatter": reductions,
            "all_reduce": self.all_reduces or reductions,
            "all_to_all": self.all_to_alls or reductions,
        }

    @property
    def algorithms(self) -> Algorithms:
        """How the runtime will move bytes."""
        backend = "nccl" if self.device == "cuda" else "gloo"
        return algorithms_for(backend, self.device, 2, 2)

    def link_seconds(
        self, program: Program, start: fx.Node, whole: frozenset[str] = frozenset()
    ) -> float:
        """Time of a collective on the idle link.

        Args:
            program: where it is.
            start: `unshard_start` or `reduce_start`.
            whole: parameters whose full values are there: see `already_whole`.
        """
        return self.link_of(program, start).seconds_of(bytes_sent(program, start, whole))

    def link_of(self, program: Program, start: fx.Node) -> Link:
        """The link as `unshard_start`, or `reduce_start`, finds it."""
        return self.links[self._collective(program, start)]

    def _collective(self, program: Program, start: fx.Node) -> Collective:
        """What moves the bytes; where messages bear tags, little replicated values are gathered."""
        if not is_call(start, REDUCE_START):
            return "all_gather"
        if codecs(start):
            return "all_to_all"
        layout, ways = specs_of(program, start)[0].layout, self.algorithms
        if layout.sharded:
            return "reduce_scatter"
        gathered = layout.num_replicas * program.full_bytes(start)
        little = not ways.untagged and gathered <= ways.pack_bytes
        return "all_gather" if little else "all_reduce"

    def code_seconds(
        self, program: Program, node: fx.Node, whole: frozenset[str] = frozenset()
    ) -> float:
        """Time of the kernels that make or read codes at a node: each byte is moved once.

        Args:
            program: where it is.
            node: any; kernels run at starts of collectives, and at the first of their waits.
            whole: as above.
        """
        start = collective_of(node)
        if start is None or self._is_there(start, whole):
            return 0.0
        moved = sum(map(operand_bytes, kernels_at(program, node)))
        return moved / self.roofline.bytes_per_second

    @staticmethod
    def _is_there(start: fx.Node, whole: frozenset[str]) -> bool:
        """Whether a gather has nothing to send."""
        return is_call(start, UNSHARD_START) and whole.issuperset(facts(start).members)

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def loads_machine(text: str) -> Machine:
    """Read what `Machine.dumps` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        for name in _LINKS:
            if (link := data.get(name)) is not None:
                data[name] = Link(**link)
        roofline, host = Roofline(**data.pop("roofline")), _host(data.pop("host"))
        return Machine(roofline=roofline, host=host, **data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no description of a machine: {error}") from error


def _host(data: dict[str, Any]) -> Host:
    return Host(processor=Processor(**data.pop("processor", {})), **data)


def already_whole(program: Program, kept: frozenset[str]) -> frozenset[str]:
    """Parameters whose full values are there when a program begins, so that a gather sends nothing.

    Resident copies are out of date once an optimizer stepped; those of frozen parameters never.

    Args:
        program: any.
        kept: parameters that earlier programs of the step left whole.
    """
    backward = program.region is Region.BACKWARD
    resident = frozenset(
        name
        for name, spec in program.params.items()
        if spec.layout.resident and (backward or not spec.trainable)
    )
    return resident | kept


def left_to(
    programs: tuple[Program, Program], there: frozenset[str] = frozenset()
) -> tuple[frozenset[str], frozenset[str]]:
    """What is whole when forward and backward begin, if earlier graphs of the step left `there`."""
    return there, there | kept_by(programs[0])


def kept_by(forward: Program) -> frozenset[str]:
    """Parameters that a program leaves whole."""
    return frozenset(facts(node).param for node in forward.calls(KEEP))


def bytes_sent(program: Program, start: fx.Node, whole: frozenset[str]) -> int:
    """What a rank sends in a collective, of whose members some may be there already.

    Args:
        program: where it is.
        start: `unshard_start` or `reduce_start`.
        whole: see `already_whole`.
    """
    record = facts(start)
    if not is_call(start, UNSHARD_START) or whole.isdisjoint(record.members):
        return record.wire_bytes
    # Each member travels only if it is not there.
    sizes = dict(zip(record.members, map(program.full_bytes, waits_of(start)), strict=True))
    missing = sum(size for name, size in sizes.items() if name not in whole)
    return record.wire_bytes * missing // max(1, sum(sizes.values()))


def machine_of(device: str, table: CommTable | None = None) -> Machine:
    """The machine of a run: what `zerofx bench comm` measured there, else a typical one.

    A core of a CPU computes 50 GFLOP/s and reads 10 GB/s, and gloo on one host sends 1 GB/s after
    0.1 ms; a GPU computes 400 TFLOP/s and reads 2 TB/s, and NCCL sends 25 GB/s after 20 µs.

    Args:
        device: `cuda` or `cpu`.
        table: costs of collectives there.
    """
    fast = device == "cuda"
    roofline = Roofline(400e12, 2e12) if fast else Roofline()
    if table is None:
        return Machine(device, roofline, Link(25e9, 20e-6) if fast else Link(1e9, 1e-4))
    links = table.links()
    return Machine(
        device,
        roofline,
        links["all_gather"],
        reductions=links["reduce_scatter"],
        all_reduces=links.get("all_reduce"),
        all_to_alls=links.get("all_to_all"),
        measured=table.measured,
        most_bucket_bytes=table.bucket_bytes(),
    )


DATACENTER_GPU = machine_of("cuda")
"""What is assumed of a machine that nobody describes."""
