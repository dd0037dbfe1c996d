"""`zerofx bench`: what collectives, kernels and Python cost here, measured and kept."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from rich.table import Table

from zerofx.cli import units
from zerofx.cli.command import Answer
from zerofx.cli.progress import Progress
from zerofx.cost.link import Link
from zerofx.cost.machine import Machine
from zerofx.cost.tables import CommTable
from zerofx.errors import ConfigError
from zerofx.frontend.trial import measure_machine
from zerofx.runtime.calibrate import SIZES, calibrate, ways_of
from zerofx.runtime.comm import Comm, make_comm
from zerofx.runtime.network import ranks_of_a_node, save_machine, save_table

_REMEDY = "start it under torchrun: torchrun --nproc-per-node 2 -m zerofx bench comm"


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Measure on all ranks; rank 0 keeps the table and prints it."""
    for name in ("repeats", "steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} is not allowed", "use at least 1")
    if len(set(args.size or SIZES)) < 2 and not args.forget:
        raise ConfigError(
            "transfers of one size do not tell latency from bandwidth, and ranks go by the table",
            "name --size twice or more, with different sizes, or add --forget",
        )
    with _world() as device:
        group = dist.group.WORLD
        assert group is not None
        local = ranks_of_a_node(args.ranks_per_node, dist.get_world_size())
        comm = make_comm(group, device, local)
        table = _measure(args, comm, device, progress)
        if args.what == "machine":
            progress.step("training small models")
            machine = measure_machine(comm, device, table, args.steps)
            if comm.rank:
                return Answer(None, (), silent=True)
            where = "not kept" if args.forget else f"kept in {save_machine(machine, table)}"
            return Answer(dataclasses.asdict(machine), (_show_machine(machine), f"{where}\n"))
        if comm.rank:
            return Answer(None, (), silent=True)
        where = "not kept" if args.forget else f"kept in {save_table(table)}"
        return Answer(dataclasses.asdict(table), (_show(table), f"{where}\n"))


def _measure(
    args: argparse.Namespace, comm: Comm, device: torch.device, progress: Progress
) -> CommTable:
    progress.expect(len(list(ways_of(comm))))
    return calibrate(
        comm,
        device,
        sizes=args.size or SIZES,
        repeats=args.repeats,
        report=lambda cost: progress.step(f"{cost.collective}, {cost.algorithm}, {cost.dtype}"),
    )


@contextlib.contextmanager
def _world() -> Iterator[torch.device]:
    """The default process group; made here unless the caller has one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        number = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    mine = not dist.is_initialized()
    if mine:
        if "RANK" not in os.environ:
            raise ConfigError("there are no ranks to measure between", _REMEDY)
        dist.init_process_group()
    try:
        if dist.get_world_size() == 1:
            raise ConfigError("one rank has nobody to talk to", _REMEDY)
        yield device
    finally:
        if mine:
            dist.destroy_process_group()


def _show_machine(machine: Machine) -> Table:
    roofline, host, links = machine.roofline, machine.host, machine.links
    out = Table(title="of one rank, while all work", show_header=False)
    for name, value in (
        ("matrix products, fp32", f"{roofline.flops / 1e9:.3g} GFLOP/s"),
        ("memory", f"{units.show_bytes(roofline.bytes_per_second)}/s"),
        ("gathers", _show_link(links["all_gather"])),
        ("reductions", _show_link(links["reduce_scatter"])),
        ("of replicated parameters", _show_link(links["all_reduce"])),
        ("of codes", _show_link(links["all_to_all"])),
        ("kernels lose to a collective", f"{host.contention:.0%} of its time"),
        ("ranks per core", f"{host.processor.ranks_per_core:.3g}"),
        ("core time of a gathered GB", units.show_seconds(1e9 * host.processor.gathered)),
        ("core time of a reduced GB", units.show_seconds(1e9 * host.processor.reduced)),
        ("Python: a program", units.show_seconds(host.program)),
        ("a collective", units.show_seconds(host.collective)),
        ("a member of one", units.show_seconds(host.member)),
        ("a kernel", units.show_seconds(host.kernel)),
        ("a parameter in the optimizer's step", units.show_seconds(host.update)),
        ("the optimizer's kernels", f"{units.show_bytes(host.update_rate)}/s"),
    ):
        out.add_row(name, value)
    return out


def _show_link(link: Link) -> str:
    return f"{units.show_seconds(link.latency)} and {units.show_rate(link.bytes_per_second)}"


def _show(table: CommTable) -> Table:
    chosen = table.chosen()
    out = Table(title=table.topology)
    for name in ("collective", "algorithm", "dtype", "latency", "bandwidth", "chosen"):
        numeric = name in ("latency", "bandwidth")
        out.add_column(name, justify="right" if numeric else "left")
    for cost in table.costs:
        out.add_row(
            cost.collective,
            cost.algorithm,
            cost.dtype,
            units.show_seconds(cost.alpha),
            f"{units.show_bytes(1 / cost.beta)}/s" if cost.beta else "–",
            "yes" if chosen[cost.collective] == cost.algorithm else "",
        )
    return out
