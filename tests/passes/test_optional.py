"""Optional passes change when bytes move and nothing else, whatever their options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofx
from tests.passes.models import close, compile_all, data_for, expected, layout_for, step
from tests.program_builder import Model, Read, specs_of
from zerofx.config import ZeroConfig
from zerofx.ir import ops
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.verify import peak_full_bytes
from zerofx.passes.pipelines import pipeline

OPTIONAL = ("fuse_unshards", "fuse_reduces", "keep_unsharded", "schedule")


def layers(
    widths: Sequence[int], order: Sequence[int], small: int, stage: int, world: int
) -> Model:
    """Products and biases in any order; a layer may be read twice, or never."""

    def forward(read: Read, _: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        x = inputs[0]
        for place in order:
            inner = torch.tanh(x @ read(f"layers.{place}.w")) @ read(f"layers.{place}.v")
            x = x + inner + read(f"layers.{place}.b")
        return ((x * read("scale")).square().mean(),)

    shapes: dict[str, Sequence[int]] = {"scale": (4,)}
    for place, width in enumerate(widths):
        shapes[f"layers.{place}.w"] = (4, width)
        shapes[f"layers.{place}.v"] = (width, 4)
        shapes[f"layers.{place}.b"] = (4,)
    params = specs_of(shapes, layout_for(stage, world, 1), small=small)
    return Model(forward, params, [torch.zeros(3, 4, dtype=torch.float64)])


@st.composite
def situations(draw: st.DrawFn) -> tuple[Model, ZeroConfig, int]:
    world, stage = draw(st.integers(2, 4)), draw(st.integers(0, 3))
    widths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    order = draw(st.lists(st.integers(0, len(widths) - 1), min_size=1, max_size=6))
    model = layers(widths, order, draw(st.sampled_from([0, 5, 20])), stage, world)
    config = ZeroConfig(
        stage=stage,  # type: ignore[arg-type]
        bucket_bytes=draw(st.sampled_from([0, 40, 300, 2000, 1 << 20])),
        memory_budget=draw(st.sampled_from([None, 0, 700])),
        prefetch_bytes=draw(st.sampled_from([None, 0, 500, 5000])),
        disable=tuple(draw(st.sets(st.sampled_from(OPTIONAL)))),
    )
    return model, config, world


@settings(max_examples=40)
@given(situations())
def test_any_options_compute_what_one_process_computes(
    situation: tuple[Model, ZeroConfig, int],
) -> None:
    model, config, world = situation
    data = data_for(model, world)
    programs = compile_all(model, config.stage, pipeline(config))
    assert close(step(model, data, *programs), expected(model, data))


def compiled(**options: Any) -> tuple[Program, Program]:
    model = layers([8] * 6, range(6), 0, 3, 2)
    return compile_all(model, 3, pipeline(ZeroConfig(stage=3, **options)))


def test_larger_buckets_mean_fewer_collectives() -> None:
    layer_bytes = 8 * (4 * 8 + 8 * 4 + 4)
    counts = [
        len(compiled(bucket_bytes=size)[0].calls(ops.UNSHARD_START))
        for size in (0, layer_bytes, 2 * layer_bytes, 1 << 20)
    ]
    assert counts == [19, 7, 4, 1]


def test_equal_layers_get_equal_buckets() -> None:
    forward, _ = compiled(bucket_bytes=600)
    sizes = [len(facts(start).members) for start in forward.calls(ops.UNSHARD_START)]
    assert sizes == [3, 3, 3, 3, 3, 4]  # the last with the scale


def test_budget_bounds_what_is_gathered_ahead() -> None:
    peaks = [
        peak_full_bytes(compiled(bucket_bytes=600, prefetch_bytes=budget)[0])
        for budget in (0, 600, 1200, 1700, 1 << 20)
    ]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    assert all(peak <= budget for peak, budget in zip(peaks[1:4], (600, 1200, 1700), strict=True))


def test_without_prefetch_every_wait_follows_its_start() -> None:
    def num_early(**options: Any) -> int:
        forward, _ = compiled(bucket_bytes=600, **options)
        starts = forward.calls(ops.UNSHARD_START)
        return sum(start.next not in ops.waits_of(start) for start in starts)

    assert num_early(prefetch_bytes=0) == 0
    assert num_early() == 6


def test_schedule_makes_fewer_segments() -> None:
    def num_cuts(program: Program) -> int:
        communicates = [n.target in ops.PROGRAM_OPS for n in program.graph.nodes]
        return sum(a and not b for a, b in itertools.pairwise(communicates))

    for scheduled, plain in zip(compiled(), compiled(disable=("schedule",)), strict=True):
        assert num_cuts(scheduled) < num_cuts(plain)


class Named(nn.Module):
    """Layers that are attributes with names, or items of a list."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        layers = [nn.Linear(64, 64) for _ in range(8)]
        if listed:
            self.layers = nn.ModuleList(layers)
        else:
            for name, layer in zip("abcdefgh", layers, strict=True):
                self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if hasattr(self, "layers") else self.children():
            x = layer(x).relu()
        return x.sum()


def test_layers_without_numbers_share_no_larger_buckets() -> None:
    config = zerofx.ZeroConfig(inner="eager", dump="")
    named, listed = (
        zerofx.explain(Named(each), torch.zeros(4, 64), config=config, world_size=4).outcome
        for each in (False, True)
    )
    assert named == listed
