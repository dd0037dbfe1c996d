"""Optional passes change when bytes move and nothing else, whatever their options."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofx
from tests.hand_program import Hand
from tests.passes.cases import chain
from tests.passes.models import close, compile_all, data_for, expected, layout_for, step
from tests.program_builder import Model, Read, layout_of, specs_of
from zerofx.config import ZeroConfig
from zerofx.errors import VerificationError
from zerofx.ir import ops
from zerofx.ir.edit import Editor
from zerofx.ir.facts import Role, facts, set_facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.verify import peak_full_bytes
from zerofx.passes.base import Pass, run_passes
from zerofx.passes.fuse_reduces import FuseReduces
from zerofx.passes.keep_unsharded import KeepUnsharded
from zerofx.passes.pipelines import pipeline
from zerofx.passes.schedule import Schedule
from zerofx.sim.lockstep import run_lockstep

aten = torch.ops.aten
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


@dataclasses.dataclass(frozen=True)
class GatherAtOnce(Pass):
    """Starts every gather at the beginning."""

    name: ClassVar[str] = "gather_at_once"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD,))

    def plan(self, program: Program) -> Any:
        return tuple(program.calls(ops.UNSHARD_START))

    def apply(self, edit: Editor, plan: Any) -> None:
        for start in reversed(plan[1:]):
            edit.move_after(start, plan[0])


def test_later_passes_keep_the_budget_of_the_schedule() -> None:
    ahead = zerofx.after("schedule", GatherAtOnce())
    with pytest.raises(VerificationError, match="over 1200") as caught:
        compiled(bucket_bytes=600, prefetch_bytes=1200, passes=(ahead,))
    assert caught.value.rule == "within_budget"
    assert "after pass gather_at_once" in str(caught.value)
    assert "prefetch_bytes" in caught.value.remedy
    compiled(bucket_bytes=600, prefetch_bytes=1 << 20, passes=(ahead,))  # the remedy


def test_without_prefetch_every_wait_follows_its_start() -> None:
    def num_early(**options: Any) -> int:
        forward, _ = compiled(bucket_bytes=600, **options)
        starts = forward.calls(ops.UNSHARD_START)
        return sum(start.next not in ops.waits_of(start) for start in starts)

    assert num_early(prefetch_bytes=0) == 0
    assert num_early() == 6


def test_reductions_start_ahead_of_gathers_that_are_needed_later() -> None:
    _, backward = compiled(bucket_bytes=600)
    nodes = list(backward.graph.nodes)
    segment = dict(zip(nodes, itertools.accumulate(map(ops.computes, nodes)), strict=True))
    ahead: list[bool] = []
    for start, following in itertools.pairwise(backward.calls(ops.REDUCE_START)):
        for gather in backward.calls(ops.UNSHARD_START):
            if segment[gather] == segment[start]:
                first = nodes.index(start) < nodes.index(gather)
                assert first == (segment[ops.waits_of(gather)[0]] > segment[following])
                ahead.append(first)
    assert any(ahead)


def test_means_that_a_program_goes_on_to_compute_with_stay_where_they_are() -> None:
    """A gather of what is computed of one, too; here a gradient comes of that."""
    layout = layout_for(3, 2, 1)
    hand = Hand(specs_of({"w": (3, 3), "v": (3, 3)}, layout), Region.BACKWARD)
    w, v, dy = hand.shard("w"), hand.shard("v"), hand.input("dy", 3, 3)
    mean = hand.reduced(hand.call(aten.mm.default, dy, dy), w)
    half = hand.call(aten.mul.Tensor, mean, 0.5)
    start = hand.call(ops.UNSHARD_START, [half], layout.handle, role=Role.UNSHARD, param="w")
    set_facts(start, dataclasses.replace(facts(start), members=("w",)))
    full = hand.call(ops.UNSHARD_WAIT, start, half, [3, 3], role=Role.FULL, param="w")
    grad = hand.call(aten.mm.default, dy, full)
    hand.free(full)
    program = hand.program([mean, hand.reduced(grad, v)], 0)
    shards = [torch.zeros(rows, 3, dtype=torch.float64) for rows in (2, 1)]
    inputs = [[shard, shard, torch.randn(3, 3, dtype=torch.float64)] for shard in shards]
    before = run_lockstep(program, inputs)
    run_passes(program, [FuseReduces(target_bytes=1000), Schedule(prefetch_bytes=1000)])
    assert close(run_lockstep(program, inputs), before, exact=True)


def test_of_what_a_budget_keeps_the_smallest_come_first() -> None:
    params = specs_of({"l.0.w": (9, 3), "l.1.w": (1, 9), "l.2.w": (3, 1)}, layout_of(2))
    program = chain(params, later=tuple(params))()
    kept = KeepUnsharded(budget_bytes=240).plan(program).kept
    assert [facts(free).param for free, _ in kept] == ["l.2.w", "l.1.w"]


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
