"""`zerofx plan`: memory, traffic and step time of a model, before any device is booked."""

from __future__ import annotations

import argparse

from zerofx.cli import units
from zerofx.cli.command import Answer, Command
from zerofx.cli.plan_text import Question, as_data, as_text, best_stage
from zerofx.cli.progress import Progress
from zerofx.cli.targets import find_target
from zerofx.config import ZeroConfig
from zerofx.cost.compute import Roofline
from zerofx.cost.link import Link
from zerofx.cost.memory import FP32_ADAM, MIXED_ADAM
from zerofx.errors import ConfigError
from zerofx.frontend.planner import Machine, Planner

_PRECISIONS = {each.name: each for each in (FP32_ADAM, MIXED_ADAM)}
_MOST_RANKS = 4096


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("target", help="package.module:factory(key=value), a config.json, or llama(key=value)")
    add("--world-size", type=int, default=8, metavar="W", help="ranks (8)")
    add("--ranks-per-node", type=int, metavar="L", help="neighbours that share a node (all)")
    add("--secondary-shards", action="store_true", help="at stage 3: hpZ, a copy inside each node")
    add("--batch", type=int, default=1, metavar="B", help="micro-batch size of a rank (1)")
    add("--length", type=int, default=2048, metavar="S", help="S in --input (2048)")
    add("--input", action="append", default=[], metavar="SPEC", help="as int64[B,S]; repeatable")
    add("--memory", type=units.size, metavar="SIZE", help="of a device, as 80GB: what fits?")
    add("--precision", choices=tuple(_PRECISIONS), default="fp32", help="fp32, or 16-bit with fp32")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="whose collectives (cuda)")
    add("--flops", type=units.speed, default=400e12, help="of a device (400T)")
    add("--bandwidth", type=units.rate, default=2e12, help="of its memory (2TB/s)")
    add(
        "--link",
        type=units.rate,
        default=25e9,
        metavar="RATE",
        help="a rank's, as 100gbit (25GB/s)",
    )
    add("--latency", type=float, default=20e-6, metavar="SECONDS", help="of a collective (20e-6)")
    add("--stage", type=int, choices=(0, 1, 2, 3), action="append", help="only these; repeatable")
    add("--whole", action="store_true", help="trace a deep model whole, not two depths of it")


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Make the plan; a check fails if nothing fits into `--memory`."""
    for name, least, most in (("world_size", 1, _MOST_RANKS), ("batch", 1, 1 << 20)):
        value = getattr(args, name)
        if not least <= value <= most:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} {value} is not allowed", f"use {least} to {most}")
    target = find_target(args.target, args.input)
    precision = _PRECISIONS[args.precision]
    machine = Machine(
        args.device, Roofline(args.flops, args.bandwidth), Link(args.link, args.latency)
    )
    planner = Planner(
        build=target.build,
        inputs=target.inputs,
        config=ZeroConfig(
            dump="",
            ranks_per_node=args.ranks_per_node,
            secondary_shards=args.secondary_shards,
        ),
        machine=machine,
        precision=precision,
        num_ranks=args.world_size,
        batch=args.batch,
        length=args.length,
        whole=args.whole,
        say=progress.step,
    )
    plan = planner.plan(tuple(sorted(set(args.stage or (0, 1, 2, 3)))))
    asked = Question(
        target.text,
        args.world_size,
        args.batch,
        args.length,
        args.memory,
        precision,
        args.ranks_per_node if args.secondary_shards else 0,
    )
    fits = args.memory is None or best_stage(plan, asked) is not None
    return Answer(as_data(plan, asked), as_text(plan, asked), ok=fits)


COMMAND = Command("plan", "what a model holds, sends and takes at each stage", configure, run)
