"""`zerofx plan`: memory, traffic and step time of a model, before any device is booked."""

from __future__ import annotations

import argparse

from zerofx.cli.command import Answer, Command
from zerofx.cli.machine import add_machine, check_range, machine_of, num_ranks_of
from zerofx.cli.plan_text import Question, as_data, as_text, best_stage
from zerofx.cli.progress import Progress
from zerofx.cli.targets import find_target
from zerofx.config import ZeroConfig
from zerofx.cost.memory import FP32_ADAM, MIXED_ADAM
from zerofx.frontend.planner import Planner

_PRECISIONS = {each.name: each for each in (FP32_ADAM, MIXED_ADAM)}
_MOST_BATCH = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_machine(parser)
    add = parser.add_argument
    add("target", help="package.module:factory(key=value), a config.json, or llama(key=value)")
    add("--ranks-per-node", type=int, metavar="L", help="neighbours that share a node (all)")
    add(
        "--secondary-shards",
        nargs="?",
        const=True,
        default=False,
        metavar="codes",
        help="at stage 3: hpZ, a copy inside each node; =codes: of what gathers sent",
    )
    add("--quantize", choices=("auto",), help="send codes where the link makes that pay")
    add("--quantize-weights", metavar="CODEC", help="at stage 3: gathers send codes, as int8x256")
    add("--quantize-gradients", metavar="CODEC", help="reductions send codes; two hops: int8,int4")
    add("--quantize-exact", action="append", metavar="PATTERN", help="what does not; repeatable")
    add("--batch", type=int, default=1, metavar="B", help="micro-batch size of a rank (1)")
    add("--length", type=int, default=2048, metavar="S", help="S in --input (2048)")
    add("--input", action="append", default=[], metavar="SPEC", help="as int64[B,S]; repeatable")
    add("--precision", choices=tuple(_PRECISIONS), default="fp32", help="fp32, or 16-bit with fp32")
    add("--stage", type=int, choices=(0, 1, 2, 3), action="append", help="only these; repeatable")
    add("--whole", action="store_true", help="trace a deep model whole, not two depths of it")


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Make the plan; a check fails if nothing fits into `--memory`."""
    num_ranks = num_ranks_of(args)
    check_range("--batch", args.batch, _MOST_BATCH)
    target = find_target(args.target, args.input)
    precision = _PRECISIONS[args.precision]
    config = _config(args)
    planner = Planner(
        build=target.build,
        inputs=target.inputs,
        config=config,
        machine=machine_of(args),
        precision=precision,
        num_ranks=num_ranks,
        batch=args.batch,
        length=args.length,
        whole=args.whole,
        say=progress.step,
    )
    plan = planner.plan(tuple(sorted(set(args.stage or (0, 1, 2, 3)))))
    asked = Question(
        target.text, num_ranks, args.batch, args.length, args.memory, precision, config
    )
    fits = args.memory is None or best_stage(plan, asked) is not None
    return Answer(as_data(plan, asked), as_text(plan, asked), ok=fits)


def _config(args: argparse.Namespace) -> ZeroConfig:
    """The options that flags name; they bear the same names."""
    given = (args.quantize_gradients or "").split(",")
    more = {} if args.quantize_exact is None else {"quantize_exact": tuple(args.quantize_exact)}
    return ZeroConfig(
        dump="",
        ranks_per_node=args.ranks_per_node,
        secondary_shards=args.secondary_shards,
        quantize=args.quantize,
        quantize_weights=args.quantize_weights,
        quantize_gradients=tuple(given) if len(given) > 1 else args.quantize_gradients,
        **more,
    )


COMMAND = Command("plan", "what a model holds, sends and takes at each stage", configure, run)
