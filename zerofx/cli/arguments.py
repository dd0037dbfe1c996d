"""What each subcommand takes; the work is in its own file, which is imported when it runs.

So help, and completions that shells ask for at their start, need none of torch's compilers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zerofx.cli import units
from zerofx.cli.command import Command
from zerofx.page.build import NAME

PRECISIONS = ("fp32", "mixed")
PARAM_DTYPES = ("bfloat16", "float16")
WEIGHT_DTYPES = ("fp32", "fp16", "bf16")


def _plan(parser: argparse.ArgumentParser) -> None:
    add_machine(parser)
    add = parser.add_argument
    add("target", help="package.module:factory(key=value), a config.json, or llama(key=value)")
    add("--ranks-per-node", type=int, metavar="L", help="neighbours that share a node (all)")
    add(
        "--secondary-shards",
        nargs="?",
        type=_codes,
        const=True,
        default=False,
        metavar="codes",
        help="at stage 3: hpZ, a copy inside each node; =codes: of what gathers sent",
    )
    add("--quantize", choices=("auto",), help="send codes where the link makes that pay")
    add("--quantize-weights", metavar="CODEC", help="at stage 3: gathers send codes, as int8x256")
    add("--quantize-gradients", metavar="CODEC", help="reductions send codes; two hops: int8,int4")
    add("--quantize-exact", action="append", metavar="PATTERN", help="what stays exact; repeatable")
    add("--batch", type=int, metavar="B", help="micro-batch size of a rank (1)")
    add("--length", type=int, metavar="S", help="S in --input (2048, or what the model takes)")
    add("--input", action="append", default=[], metavar="SPEC", help="as int64[B,S]; repeatable")
    add("--precision", choices=PRECISIONS, default="fp32", help="fp32; or 16-bit, with fp32 copies")
    add("--stage", type=int, choices=(0, 1, 2, 3), action="append", help="only these; repeatable")
    add("--param-dtype", choices=PARAM_DTYPES, help="as the option param_dtype")
    add("--formula", action="store_true", help="peak memory as an expression in B and S too")
    add("--whole", action="store_true", help="trace a deep model whole, not two depths of it")


def _codes(text: str) -> str:
    if text != "codes":
        raise argparse.ArgumentTypeError(
            f"{text!r} is no value of it, which are: none, codes. Name the target before it"
        )
    return text


def _explain(parser: argparse.ArgumentParser) -> None:
    add_machine(parser)
    add = parser.add_argument
    add("--why", metavar="NODE", help="why a node stands where it does, as unshard.layers.3")
    add("--until", metavar="PASS", help="the programs after this pass")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="of a TARGET (3)")
    add("--batch", type=int, metavar="B", help="micro-batch size of a TARGET (2)")
    add("--length", type=int, metavar="S", help="S in --input (128)")
    add("--input", action="append", default=[], metavar="SPEC", help="as int64[B,S]; repeatable")
    add("script", help="a .py file to run and watch; or a TARGET, as for zerofx plan")
    add("args", nargs=argparse.REMAINDER, help="arguments of the script")


def _diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", type=Path, help="a dump, a folder graph<N> of one, or a text file")
    parser.add_argument("other", type=Path, help="another one")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dump", type=Path, help="a folder that ZEROFX_DUMP wrote, or one graph<N>")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"the page (DIR/{NAME} by default)"
    )


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="inspect|convert")
    inspect = actions.add_parser("inspect", help="what is in it; fails if files are damaged")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    convert = actions.add_parser("convert", help="write it in another format")
    for sub in (inspect, convert):
        sub.add_argument("path", type=Path, help="of DCP (zerofx, FSDP2), DeepSpeed, safetensors")
    convert.add_argument("target", type=Path, help="folder to write; must not exist")
    convert.add_argument(
        "--to",
        choices=("dcp", "safetensors"),
        default="dcp",
        help="dcp: model and optimizer, for zerofx.checkpoint.load; safetensors: weights alone",
    )
    convert.add_argument("--dtype", choices=WEIGHT_DTYPES, help="of the weights in safetensors")
    convert.add_argument(
        "--prefix", default="model.", help="of the tensors that are weights (default: model.)"
    )


def _bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", choices=("comm", "machine"), help="collectives; or all that predictions stand on")
    add("--ranks-per-node", type=int, metavar="N", help="by default what torchrun started")
    add("--size", type=units.size, action="append", help="full size of a transfer; repeatable")
    add("--repeats", type=int, default=5, help="calls of each, of which the median counts (5)")
    add("--steps", type=int, default=20, help="for `machine` only: of small models (20)")
    add("--forget", action="store_true", help="only print: do not keep what was measured")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add options that say where a model will train; what nobody says stays `None`."""
    add = parser.add_argument
    add("--world-size", type=int, metavar="W", help="ranks (8)")
    add("--memory", type=units.size, metavar="SIZE", help="of a device, as 80GB: what fits?")
    add("--device", choices=("cuda", "cpu"), help="whose collectives (cuda)")
    add("--machine", metavar="FILE", help="what `zerofx bench machine` measured and kept")
    add("--flops", type=units.speed, help="of a device (400T)")
    add("--bandwidth", type=units.rate, help="of its memory (2TB/s)")
    add(
        "--link",
        type=units.rate,
        metavar="RATE",
        help="a rank's, as 100Gbit/s; b is a bit (25GB/s)",
    )
    add("--latency", type=units.latency, metavar="SECONDS", help="of a collective (20e-6)")


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"))


COMMANDS: tuple[Command, ...] = (
    Command("plan", "what a model holds, sends and takes at each stage", _plan),
    Command("explain", "what became of a script or model, and what would help", _explain),
    Command("diff", "what differs between two dumps", _diff),
    Command("report", "a dump as one HTML page", _report),
    Command("checkpoint", "what is in a checkpoint; another format of it", _checkpoint),
    Command("bench", "measure what collectives and steps cost here", _bench),
    Command(
        "completion",
        'print a completion script: eval "$(zerofx completion bash)"',
        _completion,
    ),
)
