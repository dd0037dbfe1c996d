"""How the passes' time grows with the size of a program.

    python -m benchmarks.passes

Builds forward programs of equal layers, of about as many nodes as asked for, and runs all passes of
stage 3 and the verifier on them. Needs no process group.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from torch._subclasses import FakeTensorMode  # noqa: TID251 (what AOTAutograd traces with)

from zerofx.config import ZeroConfig
from zerofx.ir import ops
from zerofx.ir.facts import Facts, Role, set_facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Layout, ParamSpec, Region
from zerofx.ir.verify import verify
from zerofx.passes.base import run_passes
from zerofx.passes.pipelines import pipeline

_NODES_PER_LAYER = 10
_aten = torch.ops.aten


def layers(num_nodes: int, width: int = 64) -> Program:
    """A forward program: each layer reads a weight and a bias and adds a residual."""
    layout = Layout(1, 2, 1, False)
    graph, params = fx.Graph(), dict[str, ParamSpec]()
    fake = FakeTensorMode()
    shards: list[tuple[fx.Node, fx.Node]] = []
    for layer in range(max(1, num_nodes // _NODES_PER_LAYER)):
        pair: list[fx.Node] = []
        for name, shape in (("weight", (width, width)), ("bias", (width,))):
            full = f"layers.{layer}.{name}"
            size = torch.Size(shape)
            spec = ParamSpec(full, len(params), size, torch.float32, True, layout)
            params[full] = spec
            node = graph.placeholder(f"shard_{len(params)}")
            _describe(node, fake, spec.shard_shape(0), Facts(Role.SHARD, full, layout=layout.name))
            pair.append(node)
        shards.append((pair[0], pair[1]))
    x = graph.placeholder("x")
    _describe(x, fake, (4, width), Facts())
    for layer, (weight, bias) in enumerate(shards):
        module = f"layers.{layer}"
        full = _call(graph, fake, ops.UNSHARD, (weight, [width, width], 1), f"{module}.weight")
        shift = _call(graph, fake, ops.UNSHARD, (bias, [width], 1), f"{module}.bias")
        turned = _call(graph, fake, _aten.t.default, (full,))
        y = _call(graph, fake, _aten.addmm.default, (shift, x, turned))
        for _ in range(_NODES_PER_LAYER - 7):
            y = _call(graph, fake, _aten.relu.default, (y,))
        x = _call(graph, fake, _aten.add.Tensor, (x, y))
    graph.output((x,))
    return Program(Region.FORWARD, fx.GraphModule({}, graph), params, 3, 1)


def measure(num_nodes: int) -> tuple[int, float, float]:
    """Nodes of the final program, seconds of all passes, seconds of one verification."""
    program = layers(num_nodes)
    begin = time.perf_counter()
    run_passes(program, pipeline(ZeroConfig(stage=3)), check=False)
    passed = time.perf_counter()
    verify(program, ["insert_frees"], final=True)
    return len(program.graph.nodes), passed - begin, time.perf_counter() - passed


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000])
    table = Table("nodes", "passes, s", "µs a node", "verifier, s")
    for number in parser.parse_args().nodes:
        nodes, passes, verifier = measure(number)
        table.add_row(str(nodes), f"{passes:.2f}", f"{1e6 * passes / nodes:.0f}", f"{verifier:.2f}")
    Console().print(table)


def _describe(node: fx.Node, fake: FakeTensorMode, shape: tuple[int, ...], record: Facts) -> None:
    with fake:
        node.meta["val"] = torch.empty(shape)
    set_facts(node, record)


def _call(
    graph: fx.Graph, fake: FakeTensorMode, op: Any, args: tuple[Any, ...], param: str = ""
) -> fx.Node:
    node = graph.call_function(op, args)
    values: Any = fx.map_arg(args, lambda arg: arg.meta["val"])
    with fake:
        node.meta["val"] = op(*values)
    set_facts(node, Facts(Role.FULL if param else Role.COMPUTE, param, param.rpartition(".")[0]))
    return node


if __name__ == "__main__":
    main()
