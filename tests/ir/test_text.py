"""The printed program: names by role, nothing that changes between runs."""

from __future__ import annotations

import dataclasses
import operator
import re

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.hand_program import Hand
from tests.passes.cases import gathered, read_twice
from tests.passes.golden import apply
from tests.passes.models import mlp
from tests.program_builder import layout_of, specs_of, trace_joint
from zerofx.ir import ops
from zerofx.ir.facts import Facts, Role, facts, set_facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.text import diff, node_names, print_program
from zerofx.passes.insert_frees import InsertFrees

aten = torch.ops.aten


def test_header_names_region_stage_and_parameters() -> None:
    params = specs_of({"w": (3, 2), "b": (3,)}, layout_of(4, 2), frozen=("b",), small=4)
    text = print_program(Hand(params, Region.BACKWARD, stage=3).program([]))
    assert text.splitlines() == [
        "backward program, stage 3",
        "  param w: f64[3, 2] shard4x2",
        "  param b: f64[3] replicate8, frozen",
        "return nothing",
    ]


def test_names_say_the_role() -> None:
    text = print_program(gathered())
    for line in (
        "shard.w: f64[2, 3]  # layout=shard2",
        "unshard.w = unshard_start([shard.w], shard2)",
        "full.w: f64[3, 3] = unshard_wait(unshard.w, shard.w, [3, 3])",
        "%0: f64[3, 3] = t(full.w)",
        "return %2",
    ):
        assert line in text.splitlines(), line


def test_second_value_of_a_name_is_numbered() -> None:
    names = node_names(read_twice()).values()
    assert {"full.w", "full.w#1"} <= set(names)


def test_every_node_has_its_own_name() -> None:
    program = trace_joint(mlp(layout_of(2)))
    names = [name for node, name in node_names(program).items() if node.op != "output"]
    assert len(names) == len(set(names))


def test_same_text_for_another_trace_of_the_same_model() -> None:
    first, second = (print_program(trace_joint(mlp(layout_of(2)))) for _ in range(2))
    assert first == second


def test_no_addresses_and_no_handles() -> None:
    params = specs_of({"w": (3, 3)}, layout_of(2))
    text = print_program(trace_joint(mlp(layout_of(2)))) + print_program(gathered())
    assert not re.search(r"0x[0-9a-f]{4,}|object at|<", text)
    handle = str(params["w"].layout.handle)
    assert not re.search(rf"(unshard|reduce_grad|free)\([^)]*\b{handle}\)", text)


def test_mesh_inputs_print_as_mesh() -> None:
    hand = Hand(specs_of({"w": (3, 3)}, layout_of(2)))
    shard = hand.shard("w")
    mesh = hand.graph.placeholder("primals_2")
    set_facts(mesh, Facts(Role.MESH, "w"))
    mesh.meta["val"] = object()
    lines = print_program(hand.program([shard, mesh])).splitlines()
    assert "mesh" in lines and "return shard.w, mesh" in lines


def test_symbolic_sizes_are_numbered_in_order_of_appearance() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]) + 1

    module = make_fx(double, tracing_mode="symbolic")(torch.ones(6, 5))
    text = print_program(Program(Region.INFERENCE, module, {}, 3, 1))
    assert "input.0: f32[s0, s1]" in text
    assert "f32[2*s0, s1] = cat([input.0, input.0])" in text


def test_arguments_of_all_kinds() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [
        (operator.getitem, (x, slice(1, None, 2))),
        (aten.sum.dim_IntList, (x, [0, 1], True)),
        (aten.to.dtype_layout, (x,)),
        (torch.relu, (x, 0.5, None, "mean")),
    ]
    for target, args in calls:
        graph.call_function(target, args)
    graph.call_function(
        aten.empty.memory_format,
        ([2],),
        {"dtype": torch.bfloat16, "device": torch.device("cpu"), "layout": torch.strided},
    )
    graph.output((x,))
    text = print_program(Program(Region.INFERENCE, fx.GraphModule({}, graph), {}, 3, 1))
    for piece in (
        "getitem(input.0, 1::2)",
        "sum.dim_IntList(input.0, [0, 1], True)",
        "relu(input.0, 0.5, None, 'mean')",
        "empty.memory_format([2], dtype=bf16, device=cpu, layout=strided)",
    ):
        assert piece in text, piece


def test_dtypes_are_short() -> None:
    hand = Hand({})
    x = hand.input("x", 2)
    kinds = {
        torch.float8_e4m3fn: "f8_e4m3fn",
        torch.int64: "i64",
        torch.bool: "bool",
        torch.uint8: "u8",
        torch.complex64: "c64",
    }
    for dtype in kinds:
        x.meta["val"] = torch.empty(2, dtype=dtype, device="meta")
        assert f"input.0: {kinds[dtype]}[2]" in print_program(_copy(hand, x))


def test_diff_shows_what_a_pass_did_and_nothing_else() -> None:
    program = gathered()
    before = print_program(program)
    assert diff(before, print_program(program)) == ""
    apply(program, InsertFrees())
    changed = [
        line for line in diff(before, print_program(program)).splitlines() if line[0] in "+-"
    ]
    assert changed == ["--- before", "+++ after", "+free(full.w, shard2)  # by=insert_frees"]


def test_notes_name_bucket_bytes_module_and_pass() -> None:
    hand = Hand(specs_of({"layers.0.weight": (4, 4)}, layout_of(2)))
    start = hand.start(hand.shard("layers.0.weight"))
    record = Facts(
        Role.FULL, "layers.0.weight", "layers.0", bucket="b3", wire_bytes=64, origin="fuse"
    )
    wait = hand.wait(start)
    set_facts(wait, record)
    text = print_program(hand.program([wait]))
    assert "# wire=64B module=layers.0 bucket=b3 by=fuse" in text


def test_buckets_are_called_by_their_names() -> None:
    hand = Hand(specs_of({"v": (4, 4), "w": (4, 4)}, layout_of(2)))
    shards = [hand.shard("v"), hand.shard("w")]
    start = hand.start(*shards)
    set_facts(start, dataclasses.replace(facts(start), bucket="layers.0"))
    waits = [hand.wait(start, shard) for shard in shards]
    text = print_program(hand.program([hand.call(aten.mm.default, *waits)]))
    assert "unshard.layers.0 = unshard_start([shard.v, shard.w], shard2)\n" in text
    assert "full.w: f64[4, 4] = unshard_wait(unshard.layers.0, shard.w, [4, 4])\n" in text


def test_node_that_names_no_parameter_elsewhere_says_it() -> None:
    hand = Hand(specs_of({"w": (4, 4)}, layout_of(2)))
    view = hand.call(aten.t.default, hand.gather(hand.shard("w")), param="w")
    assert "%0: f64[4, 4] = t(full.w)  # param=w" in print_program(hand.program([view]))
    assert not ops.is_call(view, ops.FREE)


def _copy(hand: Hand, node: fx.Node) -> Program:
    graph = fx.Graph()
    graph.output((graph.node_copy(node),))
    return Program(hand.region, fx.GraphModule({}, graph), {}, 3, 1)
