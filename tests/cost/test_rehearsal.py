"""A rehearsal is the real pipeline: its programs are those that ranks would run."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.gpt import Gpt
from tests.models import batch, make
from tests.sim.test_captured import capture_programs
from zerofx.config import ZeroConfig
from zerofx.cost.liveness import held_after, live_bytes
from zerofx.cost.machine import machine_of
from zerofx.cost.memory import FP32_ADAM
from zerofx.errors import UnsupportedError
from zerofx.frontend.joint import dynamo_graph
from zerofx.frontend.layouts import describe_params
from zerofx.frontend.planner import Planner
from zerofx.frontend.rehearsal import rehearse_graph, rehearse_model
from zerofx.frontend.stacks import as_read, shorten, stack_depth
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.verify import peak_full_bytes
from zerofx.ir.view import identity_source
from zerofx.torch_private import fake_mode

WORLD = 4
LOGGER = logging.getLogger(__name__)


@pytest.fixture
def first_of_four() -> Iterator[None]:
    """This process as rank 0 of four that do not exist, nor does a store unless torch makes one."""
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    yield
    torch.compiler.reset()
    dist.destroy_process_group()


def _lines(program: Program) -> list[str]:
    """What is called, in order, and on which parameters; DTensors bring views that view nothing."""
    return [
        f"{node.target} {facts(node).param} {facts(node).members} {facts(node).wire_bytes}"
        for node in program.graph.nodes
        if node.op == "call_function" and identity_source(node) is node
    ]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *itertools.product(("mlp", "twice", "frozen"), (0, 1, 2, 3)),
        *itertools.product(("gpt", "gpt_checkpointed"), (1, 3)),
    ],
)
def test_programs_are_those_of_ranks(
    name: str, stage: int, first_of_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make(name, torch.float32), batch(name, 0, 0, torch.float32)
    module, values = dynamo_graph(model, inputs, {})
    rehearsal = rehearse_graph(module, values, model, inner="eager")
    config: Any = ZeroConfig(stage=stage, inner="eager", min_shard_numel=0)  # type: ignore[arg-type]
    rehearsed = rehearsal.programs(config, WORLD)
    real, _ = capture_programs(copy.deepcopy(model), inputs, stage, monkeypatch)
    for program, region in zip(rehearsed, (Region.FORWARD, Region.BACKWARD), strict=True):
        assert _lines(program) == _lines(real[region])


class _Selective(nn.Module):
    """Checkpoints that keep what matrices were multiplied to, in a nested region or in none."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_mlp() for _ in range(2))
        self.call = torch.compiler.nested_compile_region(_checkpoint) if nested else _checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def _keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    return cast(Tensor, checkpoint(block, x, use_reentrant=False, context_fn=contexts))


@pytest.mark.parametrize("nested", [False, True])
def test_a_selective_checkpoint_keeps_what_its_policy_says(
    nested: bool, first_of_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = _Selective(nested), (torch.randn(4, 8),)
    module, values = dynamo_graph(model, inputs, {})
    rehearsal = rehearse_graph(module, values, model, inner="eager")
    real, _ = capture_programs(model, inputs, 3, monkeypatch)
    for backward in (rehearsal.halves(ZeroConfig(), 2)[1], real[Region.BACKWARD]):
        assert not backward.calls(torch.ops.aten.addmm.default)
        assert backward.calls(torch.ops.aten.tanh.default)


def test_a_rehearsal_serves_any_stage_and_leaves_no_trace() -> None:
    rehearsal = rehearse_model(
        lambda: Gpt(depth=1), lambda: ((torch.zeros(2, 8, dtype=torch.int64),), {}), "eager"
    )
    before = rehearsal.programs(ZeroConfig(stage=3, inner="eager"), 4096)
    rehearsal.programs(ZeroConfig(stage=1, inner="eager"), 2)
    after = rehearsal.programs(ZeroConfig(stage=3, inner="eager"), 4096)
    assert [_lines(p) for p in before] == [_lines(p) for p in after]


class Broken(torch.nn.Linear):
    """Needs two graphs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(input)


def test_a_graph_break_is_named() -> None:
    with pytest.raises(UnsupportedError, match="Broken does not run as one graph") as refused:
        rehearse_model(lambda: Broken(3, 3), lambda: ((torch.zeros(2, 3),), {}))
    said = str(refused.value)
    assert re.search(r"test_rehearsal.py:\d+ in forward: torch._dynamo.graph_break\(\)", said)
    assert "Developer debug context" not in said and "https://" not in said and ".. " not in said


def test_stacks_of_equal_blocks_are_found() -> None:
    with fake_mode():
        model = Gpt(depth=8)
        assert stack_depth(model) == 8
        shorten(model, 3)
        assert len(model.blocks) == 3 and stack_depth(model) == 0
        model = Gpt(depth=8)
        model.blocks[5].num_heads = 2
        assert stack_depth(model) == 0
        for number, block in enumerate((numbered := Gpt(depth=8)).blocks):
            block.layer_idx = number
        assert stack_depth(numbered) == 8
        strided = nn.ModuleList(nn.Conv2d(1, 1, 3, stride=1 + n % 2) for n in range(8))
        assert stack_depth(nn.Sequential(strided)) == 0
        idle = [f"blocks.{number}.norm1.weight" for number in range(8)]
        few = [spec.name for spec in describe_params(Gpt(depth=3)) if spec.name not in idle]
        params, unread = as_read(describe_params(Gpt(depth=8)), few, shortened=True)
        assert unread == tuple(idle)
        assert [spec.name for spec in params if not spec.trainable] == idle


class _Counts(nn.Module):
    """Its forward knows how many blocks it has."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 8
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(self.depth))

    def forward(self, x: Tensor) -> Tensor:
        for place in range(self.depth):
            x = self.blocks[place](x)
        return x.square().mean()


class _Wrapped(_Counts):
    """Its forward takes it as the first of `args`, as decorators of transformers do."""

    def forward(*args: Any) -> Tensor:
        model, x = args
        for block in model.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("kind", "depth"), [(_Counts, 0), (_Wrapped, 8)])
def test_a_stack_is_traced_whole_where_its_forward_counts_blocks(
    kind: type[nn.Module], depth: int
) -> None:
    config = ZeroConfig(inner="eager", dump="", bucket_bytes=0, quantize="auto")
    machine = dataclasses.replace(machine_of("cpu"), most_bucket_bytes=1 << 20)

    def inputs(batch: int, length: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (torch.zeros(batch, 512),), {}

    plan = Planner(kind, inputs, config, machine, FP32_ADAM, 2, 2, 1).plan((3,))
    assert plan.depth == depth and plan.num_params == 8 * (512 * 512 + 512)
    (stage,) = plan.stages.values()
    both = stage.times.step - stage.times.update
    for found in stage.weighed.values():
        assert both == pytest.approx(found.coded if found.pays else found.exact)


class _Reads(nn.Module):
    """Constructors that ask for values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(4, 4), std=0.02))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.warning("as good as none")
        return x @ self.weight * self.rates[2]


def test_constructors_that_read_and_cast_and_models_that_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[_Reads] = []

    def build() -> nn.Module:
        made.append(_Reads().to(torch.bfloat16).float())
        return made[-1]

    rehearsal = rehearse_model(build, lambda: ((torch.zeros(2, 4),), {}), "eager")
    assert made[0].rates == pytest.approx([0.0, 0.05, 0.1]) and made[0].weight.device.type == "cpu"
    assert [spec.name for spec in rehearsal.params] == ["weight"] and LOGGER.name not in caplog.text


class _Lower(nn.Module):
    """Computes in bf16, as it asks for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return x.float().square().mean()


def test_gathered_values_count_in_the_dtype_in_which_they_lie() -> None:
    rehearsal = rehearse_model(_Lower, lambda: ((torch.zeros(2, 64),), {}), "eager")
    config = ZeroConfig(stage=3, inner="eager", dump="", min_shard_numel=0, memory_budget=1 << 20)
    forward, backward = rehearsal.programs(config, WORLD)
    ways = machine_of("cpu").algorithms
    held = held_after(forward, ways, fused=False)
    assert held.kept and set(held.kept.values()) == {64 * 64 * 2}
    gathered = live_bytes(forward, ways, fused=False).live[:, 3]
    assert gathered.max() == peak_full_bytes(forward)
    assert live_bytes(backward, ways, fused=False, before=held).live[-1, 3] == 0


def test_only_stage_3_gathers_in_the_dtype_of_autocast(
    first_of_four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = _Lower(), (torch.zeros(2, 64),)
    module, values = dynamo_graph(model, inputs, {})
    rehearsal = rehearse_graph(module, values, model, inner="eager")
    cases: Any = [(3, ()), (1, ()), (3, ("cast_before_gather",))]
    for stage, left in cases:
        config = ZeroConfig(stage=stage, inner="eager", min_shard_numel=0, disable=left)
        real, _ = capture_programs(copy.deepcopy(model), inputs, stage, monkeypatch, disable=left)
        for program in rehearsal.programs(config, WORLD):
            assert _lines(program) == _lines(real[program.region])
