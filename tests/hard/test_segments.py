"""Segments through Inductor: shared by depth, exact in strides, aliases and mutations."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.hard.pair import EAGER, INDUCTOR, Pair, draw, same
from tests.ranks import run_ranks
from zerofx.frontend import inner
from zerofx.frontend.partition import repeat_constants
from zerofx.frontend.segments import Segment, split
from zerofx.ir.facts import Facts, facts, set_facts
from zerofx.ir.ops import FREE
from zerofx.torch_private import run_boxed


class Deep(nn.Module):
    """Residual blocks with dropout."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def _num_distinct(depths: list[int]) -> list[tuple[int, int]]:
    """Distinct segments, and ones that reuse them; nothing is compiled."""
    counts: list[tuple[int, int]] = []
    plain = inner.SegmentCompiler.compile
    for depth in depths:
        kernels: list[Any] = []

        def compile_and_count(
            self: Any, segments: Sequence[Segment], *, into: list[Any] = kernels, **how: bool
        ) -> list[Any]:
            made = plain(self, segments, **how)  # type: ignore
            into += [each for each, one in zip(made, segments, strict=True) if not one.only_views]
            return made

        torch._dynamo.reset()
        by_block = {**INDUCTOR, "bucket_bytes": 400}
        run = torch.compile(Deep(depth), backend="zero3", options=by_block)
        with (
            patch.object(inner.SegmentCompiler, "compile", compile_and_count),
            patch.object(inner, "compile_with_inductor", _not_inductor),
        ):
            run(draw(3, 8)).backward()
        counts.append((len({*kernels}), len(kernels) - len({*kernels})))
    return counts


def _not_inductor(module: fx.GraphModule, *_: Any) -> Any:
    return run_boxed(module, module.graph)


def test_compilations_do_not_grow_with_depth() -> None:
    two, five, nine = run_ranks(2, _num_distinct, [2, 5, 9])[0]
    # Two blocks have no middle; beyond that only reuse grows.
    assert five[0] == nine[0] and two[0] <= five[0], (two, five, nine)
    assert nine[1] > five[1] > two[1]


class Strided(nn.Module):
    """Convolution and BatchNorm over channels_last, whose strides later segments rely on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = F.relu(self.norm(self.conv1(x)))
        return self.head(self.conv2(maps).mean((2, 3))).square().mean(), maps


def _strides() -> None:
    pair = Pair(Strided().to(memory_format=torch.channels_last), 3, INDUCTOR, rtol=1e-4)
    # All ranks see the same images: BatchNorm's statistics are then the plain model's.
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for _ in range(2):
        (ours, our_maps), (theirs, their_maps) = pair.run(x), pair.plain(x)
        assert our_maps.stride() == their_maps.stride()
        same(our_maps.detach(), their_maps.detach(), "maps", 1e-4)
        for loss in (ours, theirs):
            loss.backward()
        pair.step()


def test_channels_last_strides_survive() -> None:
    run_ranks(2, _strides, timeout=220)


class Transposed(nn.Module):
    """Norms over transposed values: kernels give them other strides than tracing says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 5, bias=False)
        self.batch, self.layer = nn.BatchNorm1d(6), nn.LayerNorm(9)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.batch(self.first(x).transpose(1, 2)).transpose(1, 2).tanh()
        hidden = self.layer(self.head(hidden).transpose(1, 2)).transpose(1, 2)
        return self.first(F.pad(hidden, (0, 1))).square().mean()


def _transposed(options: dict[str, Any], rtol: float) -> None:
    pair = Pair(Transposed(), 3, options, rtol=rtol)
    x = torch.randn(4, 9, 6)
    for _ in range(2):
        pair.backward(lambda run, _: run(x))
        pair.step()


@pytest.mark.parametrize("options, rtol", [(EAGER, 1e-6), (INDUCTOR, 1e-4)])
def test_strides_of_kernels_are_not_those_traced(options: dict[str, Any], rtol: float) -> None:
    run_ranks(2, _transposed, options, rtol)


class Aliasing(nn.Module):
    """Outputs that alias inputs and each other, and buffers that forward updates."""

    count: Tensor
    trace: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("trace", torch.zeros(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.linear(x))
        self.count += 1
        self.trace.mul_(0.9).add_(hidden.detach().mean(0) / 8)
        out = self.last(hidden) + self.trace
        return out, out.t(), hidden[:2], x.view(-1)


def _aliases(inner_name: str) -> None:
    options, rtol = (EAGER, 0.0) if inner_name == "eager" else (INDUCTOR, 1e-5)
    pair = Pair(Aliasing(), 3, options, rtol=rtol)
    x = torch.randn(4, 6)
    for number in range(3):
        ours, theirs = pair.run(x), pair.plain(x)
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same(one.detach(), other.detach(), f"output {index}", rtol)
        assert ours[1].untyped_storage().data_ptr() == ours[0].untyped_storage().data_ptr()
        assert ours[3].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        for outputs in (ours, theirs):
            (outputs[1].sin().sum() + outputs[2].sum() + outputs[0].square().mean()).backward()
        pair.step()
        assert pair.model.get_buffer("count").item() == number + 1


@pytest.mark.parametrize("inner_name", ["eager", "inductor"])
def test_aliasing_outputs_and_mutated_buffers(inner_name: str) -> None:
    run_ranks(2, _aliases, inner_name, timeout=220)


def test_placeholders_of_a_segment_have_unique_names() -> None:
    """Values called alike by different graphs (`in_0`, here) must not shadow each other."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("in_1", "in_0")]
    for node in inputs:
        node.meta["val"] = torch.empty(2)
    total = graph.call_function(torch.ops.aten.sub.Tensor, tuple(inputs))
    twice = graph.call_function(torch.ops.aten.add.Tensor, (total, inputs[0]))
    graph.output((twice,))
    (segment,) = split(graph)
    assert isinstance(segment, Segment)
    names = [node.name for node in segment.graph.nodes]
    assert len(set(names)) == len(names)
    one, other = torch.tensor([5.0, 6.0]), torch.tensor([1.0, 2.0])
    assert fx.GraphModule(segment.owner, segment.graph)(one, other)[0].tolist() == [9.0, 10.0]


class Shortcut(nn.Module):
    """Two convolutions of one input: a kernel's outputs are read far apart in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.wide = nn.Conv2d(4, 6, 3, padding=1, stride=2, bias=False)
        self.short = nn.Conv2d(4, 6, 1, stride=2)
        self.norm = nn.BatchNorm2d(6, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return (F.relu(self.norm(self.wide(x))) + self.short(x)).square().mean()


def _checked(module: fx.GraphModule, *_: Any) -> Any:
    numbers = (Tensor, torch.SymInt, torch.SymFloat)
    for node in (*module.graph.find_nodes(op="placeholder"), *module.graph.output_node().args[0]):
        assert isinstance(node.meta["val"], numbers), f"{node} is {node.meta['val']}"
    return _not_inductor(module)


def _cut_everywhere(options: dict[str, Any]) -> None:
    for stage in (1, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        by_parameter = {**INDUCTOR, "bucket_bytes": 1, **options}
        pair = Pair(Shortcut().double(), stage, by_parameter, rtol=1e-9)
        with patch.object(inner, "compile_with_inductor", _checked):
            pair.train(lambda run, n: run(draw(4 + 2 * n, 3, 8, 8, seed=n).double()))


@pytest.mark.parametrize("disable", [(), ("schedule",)])
def test_tensors_and_numbers_cross_wherever_a_program_is_cut(disable: tuple[str, ...]) -> None:
    run_ranks(2, _cut_everywhere, {"disable": disable})


def test_outputs_of_one_kernel_cross_one_by_one() -> None:
    """Wherever a program is cut, what passes from one segment to another is no tuple."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    both = graph.call_function(torch.ops.aten.split.Tensor, (value, 1))
    both.meta["val"] = (torch.empty(64, 64), torch.empty(64, 64))
    first = graph.call_function(operator.getitem, (both, 0))
    graph.call_function(FREE, (value, 0))
    second = graph.call_function(operator.getitem, (both, 1))
    first.meta["val"], second.meta["val"] = both.meta["val"]
    total = graph.call_function(torch.ops.aten.add.Tensor, (first, second))
    graph.output((total,))
    repeat_constants(graph)  # they are none
    before, _, after = split(graph)
    assert isinstance(before, Segment) and isinstance(after, Segment)
    assert before.outputs == after.inputs == (first, second)


@torch.library.custom_op("zx_segments::noise", mutates_args=())
def noise(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns)


def test_what_an_operator_of_a_library_gives_is_asked_for_once() -> None:
    graph = fx.Graph()
    drawn = graph.call_function(torch.ops.zx_segments.noise.default, (64, 64))
    drawn.meta["val"] = torch.empty(64, 64)
    graph.output((graph.call_function(torch.ops.aten.sub.Tensor, (drawn, drawn)), drawn))
    before = list(graph.nodes)
    repeat_constants(graph)
    assert list(graph.nodes) == before


def test_large_constants_are_made_where_they_are_read() -> None:
    """Zeros that AOTAutograd merged, of two embeddings' gradients, do not wait in memory."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    value.meta["val"] = torch.empty(64, 64)
    zeros = graph.call_function(torch.ops.aten.full.default, ([64, 64], 0))
    zeros.meta["val"] = torch.empty(64, 64)
    one = graph.call_function(torch.ops.aten.full.default, ([], 1))
    one.meta["val"] = torch.empty(())
    first = graph.call_function(torch.ops.aten.add.Tensor, (zeros, one))
    graph.call_function(FREE, (value, 0))
    second = graph.call_function(torch.ops.aten.mul.Tensor, (zeros, one))
    graph.output((first, second))
    for node, module in ((zeros, "layers.1"), (first, "layers.1"), (second, "layers.0")):
        set_facts(node, Facts(module=module))
    repeat_constants(graph)
    for reader in (first, second):
        assert facts(reader.all_input_nodes[0]).module == facts(reader).module
    before, _, after = split(graph)
    assert isinstance(before, Segment) and isinstance(after, Segment)
    assert (before.outputs, after.inputs) == ((one, first), (one,))
    assert fx.GraphModule(after.owner, after.graph)(torch.ones(()))[0].shape == (64, 64)
