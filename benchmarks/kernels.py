"""Time the kernels of ZeRO++ on this machine, or print how far their codes are from the numbers.

    python -m benchmarks.kernels                   # on CUDA where there is a device; one CPU thread
    python -m benchmarks.kernels --mebibytes 256 --codecs int4 int8
    python -m benchmarks.kernels --errors          # the table of docs/kernels.md

GB/s are bytes that a kernel reads and writes, each once, over its time. On CPUs kernels are the
reference through Inductor, the best of several calls, beside a copy of as many bytes; `saved` is
the time that a link of `--gbit` needs less. On CUDA, emitted kernels stand beside a device copy,
the reference through Inductor, and the quantizers of torchao and DeepSpeed where they are
installed.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.kernel_peers import PEERS
from zerofx.codegen.kernels import Kernel, kernel_for
from zerofx.codegen.reference import Reference
from zerofx.ir.kernels import (
    KernelSpec,
    Pack,
    Repack,
    Unpack,
    operand_bytes,
    reduce_kernels,
)
from zerofx.ir.parcels import Codec, Member, Parcels
from zerofx.ir.spec import Layout, ParamSpec
from zerofx.sim.quantized import reduce_quantized

_SOURCES = 4


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=float, default=64, help="of fp32 numbers")
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4", "fp8"])
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--gbit", type=float, default=1.0, help="of the link")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--errors", action="store_true", help="print errors instead, as Markdown")
    args = parser.parse_args(argv)
    if args.errors:
        print(error_table())
        return
    torch.set_num_threads(1)
    codecs = [Codec(code, args.block) for code in args.codecs]
    numel = int(args.mebibytes * 2**20 / 4) // (_SOURCES * args.block) * _SOURCES * args.block
    if torch.cuda.is_available():
        Console().print(_cuda_speeds(codecs, numel))
    else:
        Console().print(_cpu_speeds(codecs, numel, args))


def error_table() -> str:
    """Relative L2 errors on Gaussian numbers, in per cent, as a Markdown table."""
    lines = ["| codec | one pass | two hops, 4 nodes of 4 ranks |", "| --- | ---: | ---: |"]
    for code in ("int8", "fp8", "int4"):
        kinds = [Codec(code)]
        if code != "fp8":
            kinds += [Codec(code, block=64), Codec(code, block=2048), Codec(code, symmetric=False)]
            kinds += [Codec(code, rounding="stochastic")]
        for codec in kinds:
            one, two = _one_pass(codec), _two_hops(codec)
            lines.append(f"| `{codec.name}` | {100 * one:.2f} | {100 * two:.2f} |")
    return "\n".join(lines)


def _one_pass(codec: Codec) -> float:
    x = _gaussian(1 << 20, 0)
    parcels = Parcels((Member("x", x.numel(), x.numel(), x.dtype),), codec, 1)
    wire, back = torch.empty(parcels.shape, dtype=torch.uint8), torch.empty_like(x)
    Reference(Pack(parcels))([x], [wire])
    Reference(Unpack(parcels))([wire[None]], [back])
    return float((back - x).norm() / x.norm())


def _two_hops(codec: Codec) -> float:
    nodes, world, shape = 4, 16, torch.Size((1024, 64))
    layout = Layout(0, world, 1, resident=False)
    params = [ParamSpec("w", 0, shape, torch.float32, True, layout)]
    grads = [[_gaussian(shape.numel(), rank)] for rank in range(world)]
    chunks = reduce_quantized(reduce_kernels(params, codec, codec, nodes), grads)
    mean = torch.stack([grad for (grad,) in grads]).mean(0)
    return float((torch.cat([chunk for (chunk,) in chunks]) - mean).norm() / mean.norm())


def _gaussian(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def specs_of(codec: Codec, numel: int) -> dict[str, KernelSpec]:
    """One kernel of each family for `numel` numbers; the repack averages as many as it can read."""
    parcels = Parcels((Member("x", numel, numel // _SOURCES, torch.float32),), codec, _SOURCES)
    blocks = numel // codec.block // _SOURCES
    return {
        "pack": Pack(parcels),
        "unpack": Unpack(parcels),
        "repack": Repack(blocks, 1, _SOURCES, codec, codec),
    }


def _cpu_speeds(codecs: Sequence[Codec], numel: int, args: argparse.Namespace) -> Table:
    columns = ("codec", "kernel", "ms", "copy", "Inductor", "of copy", "saved")
    table = Table(*columns, title=f"one CPU thread, {numel * 4 >> 20} MiB")
    for codec in codecs:
        times: dict[str, float] = {}
        for name, spec in specs_of(codec, numel).items():
            size = operand_bytes(spec)
            run = call_of(Reference(spec, compiled=True), spec, torch.device("cpu"))
            best, copy = _best(run, args.repeats), _best(copying(size, "cpu"), args.repeats)
            times[name] = best
            table.add_row(codec.name, name, f"{best * 1e3:.2f}", *_rates(size, copy, best))
        spared = 4 * numel - specs_of(codec, numel)["pack"].outputs[0][0][1] * _SOURCES
        link = spared * 8 / args.gbit / 1e9
        cost = times["pack"] + times["unpack"]
        table.add_row("", "pack + unpack", f"{cost * 1e3:.2f}", "", "", "", f"{link * 1e3:.0f} ms")
    return table


def _rates(size: int, copy: float, best: float) -> list[str]:
    return [f"{size / copy / 1e9:.1f}", f"{size / best / 1e9:.1f}", f"{copy / best:.0%}"]


def _cuda_speeds(codecs: Sequence[Codec], numel: int) -> Table:
    title = f"{torch.cuda.get_device_name()}, {numel * 4 >> 20} MiB"
    table = Table("codec", "kernel", "by", "ms", "copy", "GB/s", "of copy", title=title)
    folder, device = Path(tempfile.mkdtemp(prefix="zerofx-kernels-")), torch.device("cuda")
    for codec in codecs:
        runs: list[tuple[str, str, Callable[[], object], int]] = []
        for name, spec in specs_of(codec, numel).items():
            size = operand_bytes(spec)
            for who, kernel in (
                ("zerofx", kernel_for(spec, device, folder)),
                ("Inductor", Reference(spec, compiled=True)),
            ):
                runs.append((name, who, call_of(kernel, spec, device), size))
        for library, peers in PEERS.items():
            try:
                runs += [
                    (p.kernel, library, p.run, p.num_bytes) for p in peers(codec, numel, _SOURCES)
                ]
            except Exception as error:
                table.add_row(codec.name, "", library, f"failed: {type(error).__name__}")
        for name, who, run, size in sorted(runs, key=lambda each: each[0]):
            best, copy = graph_seconds(run), graph_seconds(copying(size, "cuda"))
            rates = _rates(size, copy, best)
            table.add_row(codec.name, name, who, f"{best * 1e3:.3f}", *rates)
    return table


def graph_seconds(run: Callable[[], object]) -> float:
    """Median in CUDA graphs: launching from Python may take longer than a kernel."""
    testing: Any = importlib.import_module("triton.testing")
    run()
    return testing.do_bench_cudagraph(run, rep=50, return_mode="median") / 1e3


def call_of(kernel: Kernel, spec: KernelSpec, device: torch.device) -> Callable[[], object]:
    """A call of `kernel` on operands of its own."""
    inputs = [_filled(shape, dtype, device) for shape, dtype in spec.inputs]
    outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in spec.outputs]
    return lambda: kernel(inputs, outputs, 0)


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers, or bytes that decode to ordinary ones."""
    if dtype is torch.uint8:
        return torch.full(shape, 61, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def copying(size: int, device: str) -> Callable[[], object]:
    """A copy that reads and writes `size` bytes together."""
    source = torch.ones(size // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _best(run: Callable[[], object], repeats: int) -> float:
    run()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
