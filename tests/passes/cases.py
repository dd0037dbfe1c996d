"""The program of each golden case; `doc` is the one that the pass's docstring shows."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import torch
from torch import fx

from tests.hand_program import Hand
from tests.passes.code_cases import CODE_CASES
from tests.passes.return_cases import RETURN_CASES
from tests.program_builder import layout_of, specs_of
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass
from zerofx.passes.cast_before_gather import CastBeforeGather
from zerofx.passes.fuse_reduces import FuseReduces
from zerofx.passes.fuse_unshards import FuseUnshards
from zerofx.passes.insert_frees import InsertFrees
from zerofx.passes.insert_reduces import InsertReduces
from zerofx.passes.insert_unshards import InsertUnshards
from zerofx.passes.keep_unsharded import KeepUnsharded
from zerofx.passes.merge_reduces import MergeReduces
from zerofx.passes.merge_unshards import MergeUnshards
from zerofx.passes.schedule import Schedule
from zerofx.passes.sync_buffers import SyncBuffers

aten, prims = torch.ops.aten, torch.ops.prims
BF16, FP16 = torch.bfloat16, torch.float16
_TWO = specs_of({"w": (3, 3), "v": (3, 3)}, layout_of(2))
_THREE = specs_of({"l.0.w": (3, 3), "l.0.v": (3, 3), "l.1.u": (3, 3)}, layout_of(2))
_MIXED = {
    **specs_of({"a": (3, 3), "b": (3, 3)}, layout_of(2)),
    **specs_of({"c": (3, 3)}, layout_of(3)),
}
_ONE = specs_of({"w": (3, 3)}, layout_of(2))
_RESIDENT = specs_of({"w": (3, 3)}, layout_of(2, resident=True))
_REPLICATED = specs_of({"w": (3, 3)}, layout_of(2), small=100)
_LOW = dataclasses.replace(layout_of(2), reduce_dtype=BF16)
_CAST = specs_of({"w": (3, 3)}, _LOW, param_dtype=torch.float32)
_HELD = specs_of(
    {"w": (3, 3)}, dataclasses.replace(_LOW, grad_dtype=BF16), param_dtype=torch.float32
)
_CAST_REPLICATED = specs_of({"w": (3, 3)}, _LOW, param_dtype=torch.float32, small=100)
_HYBRID = specs_of({"w": (3, 3)}, layout_of(2, replicas=2))


def read_twice() -> Program:
    hand = Hand(_ONE, Region.JOINT)
    shard, x = hand.shard("w"), hand.input("x", 2, 3)
    y = hand.call(aten.mm.default, x, hand.unshard(shard))
    z = hand.call(aten.mm.default, y, hand.unshard(shard))
    return hand.program([z])


def read_thrice() -> Program:
    hand = Hand(_TWO, Region.INFERENCE)
    w, v, x = hand.shard("w"), hand.shard("v"), hand.input("x", 2, 3)
    for shard in (w, v, w, v, w):
        x = hand.call(aten.mm.default, x, hand.unshard(shard))
    return hand.program([x])


def two_gradients() -> Program:
    hand = Hand(_ONE, Region.JOINT)
    shard, g, h = hand.shard("w"), hand.input("g", 3, 3), hand.input("h", 3, 3)
    a, b = hand.reduce(g, shard), hand.reduce(h, shard)
    return hand.program([hand.call(aten.add.Tensor, a, b)], 0)


def three_gradients() -> Program:
    """As DTensors leave them: each behind views, the sum in pairs."""
    hand = Hand(_ONE, Region.JOINT)
    shard = hand.shard("w")
    total: fx.Node | None = None
    for name in "fgh":
        grad = hand.reduce(hand.input(name, 3, 3), shard)
        for _ in range(2):
            grad = hand.call(aten.view.default, grad, [2, 3])
        total = grad if total is None else hand.call(aten.add.Tensor, total, grad)
    return hand.program([total], 0)


def gradients_of_two() -> Program:
    """A sum over different parameters is the model's own affair."""
    hand = Hand(_TWO, Region.JOINT)
    w, v, g = hand.shard("w"), hand.shard("v"), hand.input("g", 3, 3)
    a, b = hand.reduce(g, w), hand.reduce(g, v)
    return hand.program([a, b, hand.call(aten.add.Tensor, a, b)], 0)


def reads_cast(
    params: dict[str, object], *dtypes: torch.dtype, stage: int = 3
) -> Callable[[], Program]:
    """One product for each cast of the weight; `float64` is the weight itself."""

    def build() -> Program:
        hand = Hand(params, Region.JOINT, stage)  # type: ignore[arg-type]
        full = hand.unshard(hand.shard("w"))
        outputs = []
        for dtype in dtypes:
            x = hand.call(
                prims.convert_element_type.default, hand.input(f"x{len(outputs)}", 2, 3), dtype
            )
            same = dtype is torch.float64
            w = full if same else hand.call(prims.convert_element_type.default, full, dtype)
            outputs.append(hand.call(aten.mm.default, x, w))
        return hand.program(outputs)

    return build


def reads(params: dict[str, object], stage: int = 3) -> Callable[[], Program]:
    def build() -> Program:
        hand = Hand(params, stage=stage)  # type: ignore[arg-type]
        full = hand.unshard(hand.shard("w"))
        return hand.program([hand.call(aten.mm.default, hand.input("x", 2, 3), full)])

    return build


def gathers_late() -> Program:
    """The gather goes to the first reader, not to where the parameter was read."""
    hand = Hand(_ONE)
    full, x = hand.unshard(hand.shard("w")), hand.input("x", 2, 3)
    x = hand.call(aten.relu.default, x)
    return hand.program([hand.call(aten.mm.default, x, hand.call(aten.t.default, full))])


def gradients(params: dict[str, object], *names: str) -> Callable[[], Program]:
    def build() -> Program:
        hand = Hand(params, Region.BACKWARD)  # type: ignore[arg-type]
        outputs = []
        for name in names:
            shard, dy = hand.shard(name), hand.input(f"dy_{name}", 2, 3)
            x = hand.call(aten.t.default, hand.input(f"x_{name}", 2, 3))
            grad = hand.reduce(hand.call(aten.mm.default, x, dy), shard)
            outputs.append(hand.call(aten.view.default, grad, list(grad.meta["val"].shape)))
        return hand.program(outputs)

    return build


def gathered() -> Program:
    hand = Hand(_ONE)
    full = hand.gather(hand.shard("w"))
    y = hand.call(aten.mm.default, hand.input("x", 2, 3), hand.call(aten.t.default, full))
    return hand.program([hand.call(aten.relu.default, y)])


def gathered_views() -> Program:
    """Views of views, lists of views and hidden views keep a value alive; copies do not."""
    hand = Hand(_ONE)
    full = hand.gather(hand.shard("w"))
    rows = hand.call(aten.unbind.int, hand.call(aten.t.default, full))
    row = hand.call(operator.getitem, rows, 1)
    flat = hand.call(aten._unsafe_view.default, row, [1, 3])
    copy = hand.call(aten.clone.default, flat)
    y = hand.call(aten.add.Tensor, flat, hand.input("x", 1, 3))
    return hand.program([hand.call(aten.add.Tensor, y, copy)])


def chain(params: dict[str, object], later: tuple[str, ...] = ()) -> Callable[[], Program]:
    """One product for each parameter, its weight gathered and freed right there.

    Backward reads those in `later` again.
    """

    def build() -> Program:
        hand = Hand(params)  # type: ignore[arg-type]
        shards = [hand.shard(name) for name in params]
        x = hand.input("x", 2, 3)
        for shard in shards:
            full = hand.gather(shard)
            x = hand.call(aten.mm.default, x, hand.call(aten.t.default, full))
            hand.free(full)
        return dataclasses.replace(hand.program([x]), read_later=frozenset(later))

    return build


def gradients_reduced(params: dict[str, object]) -> Callable[[], Program]:
    """Each gradient reduced as soon as it exists, and returned through a view."""

    def build() -> Program:
        hand = Hand(params, Region.BACKWARD)  # type: ignore[arg-type]
        shards = [hand.shard(name) for name in params]
        dy, outputs = hand.input("dy", 3, 3), []
        for shard in shards:
            dy = hand.call(aten.mm.default, dy, dy)
            reduced = hand.reduced(dy, shard)
            outputs.append(hand.call(aten.view.default, reduced, [2, 3]))
        return hand.program(outputs)

    return build


def pointwise_between() -> Program:
    """The gather goes behind the product, so that both additions stay one kernel."""
    hand = Hand(_ONE)
    shard, x = hand.shard("w"), hand.input("x", 3, 3)
    y = hand.call(aten.relu.default, hand.call(aten.mm.default, x, x))
    full = hand.gather(shard)
    z = hand.call(aten.add.Tensor, y, full)
    hand.free(full)
    return hand.program([hand.call(aten.mm.default, z, x)])


def gathered_resident() -> Program:
    hand = Hand(_RESIDENT, stage=2)
    full = hand.gather(hand.shard("w"))
    return hand.program([hand.call(aten.mm.default, hand.input("x", 2, 3), full)])


def reads_buffers() -> Program:
    hand = Hand(_ONE)
    shard = hand.shard("w")
    mean = hand.buffer("m", "bn.mean", 3)
    var = hand.buffer("s", "bn.var", 3)
    y = hand.call(aten.add.Tensor, hand.unshard(shard), mean)
    return hand.program([hand.call(aten.mul.Tensor, y, var)])


def buffers_of_two_models() -> Program:
    hand = Hand(_ONE)
    shard = hand.shard("w")
    mean = hand.buffer("m", "Net.mean", 3)
    other = hand.buffer("n", "Net#2.mean", 3, layout=2)
    y = hand.call(aten.add.Tensor, hand.unshard(shard), mean)
    return hand.program([hand.call(aten.mul.Tensor, y, other)])


CASES: dict[tuple[str, str], tuple[Pass, Callable[[], Program]]] = {
    ("merge_unshards", "doc"): (MergeUnshards(), read_twice),
    ("merge_unshards", "interleaved"): (MergeUnshards(), read_thrice),
    ("merge_reduces", "doc"): (MergeReduces(), two_gradients),
    ("merge_reduces", "three_behind_views"): (MergeReduces(), three_gradients),
    ("merge_reduces", "two_parameters"): (MergeReduces(), gradients_of_two),
    ("cast_before_gather", "doc"): (CastBeforeGather(), reads_cast(_ONE, BF16)),
    ("cast_before_gather", "twice"): (CastBeforeGather(), reads_cast(_ONE, BF16, BF16)),
    ("cast_before_gather", "two_dtypes"): (CastBeforeGather(), reads_cast(_ONE, BF16, FP16)),
    ("cast_before_gather", "read_whole_too"): (
        CastBeforeGather(),
        reads_cast(_ONE, BF16, torch.float64),
    ),
    ("cast_before_gather", "resident"): (
        CastBeforeGather(),
        reads_cast(_RESIDENT, BF16, stage=2),
    ),
    ("insert_unshards", "doc"): (InsertUnshards(), reads(_ONE)),
    ("insert_unshards", "first_reader"): (InsertUnshards(), gathers_late),
    ("insert_unshards", "resident"): (InsertUnshards(), reads(_RESIDENT, 2)),
    ("insert_unshards", "replicated"): (InsertUnshards(), reads(_REPLICATED)),
    ("insert_unshards", "cast"): (InsertUnshards(), reads(_CAST)),
    ("insert_unshards", "cast_replicated"): (InsertUnshards(), reads(_CAST_REPLICATED)),
    ("insert_reduces", "doc"): (InsertReduces(), gradients(_ONE, "w")),
    ("insert_reduces", "ready"): (InsertReduces(), gradients(_TWO, "w", "v")),
    ("insert_reduces", "end"): (InsertReduces(place="end"), gradients(_TWO, "w", "v")),
    ("insert_reduces", "replicated"): (InsertReduces(), gradients(_REPLICATED, "w")),
    ("insert_reduces", "reduce_dtype"): (InsertReduces(), gradients(_CAST, "w")),
    ("insert_reduces", "grad_dtype"): (InsertReduces(), gradients(_HELD, "w")),
    ("insert_reduces", "hybrid"): (InsertReduces(), gradients(_HYBRID, "w")),
    ("insert_frees", "doc"): (InsertFrees(), gathered),
    ("insert_frees", "views"): (InsertFrees(), gathered_views),
    ("insert_frees", "resident"): (InsertFrees(), gathered_resident),
    ("fuse_unshards", "doc"): (FuseUnshards(target_bytes=1000), chain(_TWO)),
    ("fuse_unshards", "blocks"): (FuseUnshards(target_bytes=200), chain(_THREE)),
    ("fuse_unshards", "layouts"): (FuseUnshards(target_bytes=1000), chain(_MIXED)),
    ("fuse_unshards", "alone"): (FuseUnshards(target_bytes=0), chain(_TWO)),
    ("fuse_reduces", "doc"): (FuseReduces(target_bytes=1000), gradients_reduced(_TWO)),
    ("fuse_reduces", "blocks"): (FuseReduces(target_bytes=200), gradients_reduced(_THREE)),
    ("keep_unsharded", "doc"): (KeepUnsharded(), chain(_ONE, later=("w",))),
    ("keep_unsharded", "last"): (KeepUnsharded(), chain(_TWO, later=("w", "v"))),
    ("keep_unsharded", "strict"): (KeepUnsharded(budget_bytes=0), chain(_TWO, later=("w", "v"))),
    ("keep_unsharded", "budget"): (
        KeepUnsharded(budget_bytes=100),
        chain(_THREE, later=("l.0.w", "l.0.v")),
    ),
    ("schedule", "doc"): (Schedule(), chain(_TWO)),
    ("schedule", "strict"): (Schedule(prefetch_bytes=0), chain(_TWO)),
    ("schedule", "seams"): (Schedule(), pointwise_between),
    ("schedule", "reductions"): (Schedule(), gradients_reduced(_THREE)),
    ("sync_buffers", "doc"): (SyncBuffers(), reads_buffers),
    ("sync_buffers", "two_models"): (SyncBuffers(), buffers_of_two_models),
    ("sync_buffers", "no_buffers"): (SyncBuffers(), gathered),
    **CODE_CASES,
    **RETURN_CASES,
}
