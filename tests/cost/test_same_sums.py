"""Planner, explanation and choice sum up the same things, and those that ranks hold and send."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.debug.trained import Net
from zerofx.cli.plan_text import _precision
from zerofx.cli.plan_wire import Rates
from zerofx.config import ZeroConfig
from zerofx.cost.comm import algorithms_for
from zerofx.cost.machine import Machine, machine_of
from zerofx.cost.memory import FP32_ADAM, MIXED_ADAM, PSI, States, W, precision_of
from zerofx.cost.surface import B, S
from zerofx.debug.explanation import Explanation
from zerofx.errors import ConfigError
from zerofx.frontend.choose import predicted_peaks
from zerofx.frontend.layouts import describe_params
from zerofx.frontend.planner import Plan, Planner
from zerofx.frontend.rehearsal import Rehearsal, rehearse_model
from zerofx.ir.ops import REDUCE_START, STARTS
from zerofx.passes.changes import without

RANKS, BATCH, WIDTH = 4, 4, 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)


class Layers(nn.Module):
    """Five equal layers that are all sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def inputs(batch: int, length: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (torch.zeros(batch, length, WIDTH),), {}


def config_of(**options: Any) -> ZeroConfig:
    return ZeroConfig(inner="eager", dump="", min_shard_numel=0, **options)


def planner(machine: Machine | None = None, ranks: int = RANKS, **options: Any) -> Planner:
    machine, config = machine or machine_of("cpu"), config_of(**options)
    return Planner(Layers, inputs, config, machine, FP32_ADAM, ranks, BATCH, 2, whole=True)


def rehearsed(**how: Any) -> Rehearsal:
    return rehearse_model(Layers, lambda: inputs(BATCH, 2), "eager", **how)


def explained(**options: Any) -> Explanation:
    config, machine = config_of(**options), machine_of("cpu")
    x = torch.zeros(BATCH, 2, WIDTH)
    return zerofx.explain(Layers(), x, config=config, world_size=RANKS, machine=machine)


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_plans_have_the_buckets_of_ranks(cast: torch.dtype | None) -> None:
    latency = machine_of("cpu")
    for machine in (latency, dataclasses.replace(latency, most_bucket_bytes=LAYER)):
        asked = planner(machine, param_dtype=cast)
        rehearsal = rehearsed(cast=cast)
        counts = []
        for bucket_bytes in (None, asked._config_at(3, rehearsal.params).bucket_bytes):
            config = config_of(param_dtype=cast, bucket_bytes=bucket_bytes)
            programs = rehearsal.programs(config, RANKS, machine=machine)
            counts.append([len(each.calls(*STARTS)) for each in programs])
        assert counts[0] == counts[1]


def test_buckets_go_by_what_was_measured() -> None:
    machine = dataclasses.replace(machine_of("cpu"), most_bucket_bytes=1)
    few, many = (
        rehearsed().programs(config_of(), RANKS, machine=each)[1].calls(REDUCE_START)
        for each in (machine_of("cpu"), machine)
    )
    assert len(few) < len(many) == 10


@pytest.mark.parametrize("options", [{}, {"quantize_gradients": "int8.feedback"}], ids=str)
def test_plan_formula_and_explanation_have_one_peak(options: dict[str, Any]) -> None:
    asked = planner(**options)
    plan = asked.plan((3,))
    forecast = plan.stages[3].forecast
    assert bool(forecast.resident.codes) is bool(options)
    peak = forecast.peak(BATCH).total
    formula = asked.closed_forms(plan)[3].subs({B: BATCH, S: 2})
    assert int(formula) == peak == explained(**options).outcome.peak.total


@pytest.mark.parametrize(
    ("stage", "states", "sent"),
    [
        (0, States(4 * PSI, 4 * PSI, 8 * PSI), 4),
        (1, States(2 * PSI + 4 * PSI / W, 2 * PSI, 8 * PSI / W), 4),
        (2, States(2 * PSI + 4 * PSI / W, 4 * PSI / W, 8 * PSI / W), 4),
        (3, States(4 * PSI / W, 4 * PSI / W, 8 * PSI / W), 6),
    ],
)
def test_formulas_know_the_dtype_of_full_values(stage: int, states: States, sent: int) -> None:
    plan: Plan = planner(param_dtype=torch.bfloat16, memory_budget=0).plan((stage,))
    found = plan.stages[stage]
    rates = Rates.of(found, config_of(param_dtype=torch.bfloat16), FP32_ADAM, RANKS)
    for name in ("params", "grads", "optimizer"):
        assert getattr(rates.states(), name).equals(getattr(states, name)), name
    assert rates.sent().equals(sent * PSI * (W - 1) / W)
    numbers = {PSI: plan.num_params, W: RANKS}
    held = found.forecast.resident.states
    assert held.params == states.params.subs(numbers)
    # Backward gathers neither biases nor the first layer.
    assert found.sent_bytes == pytest.approx(float(rates.sent().subs(numbers)), rel=0.08)
    mixed = Rates.of(found, config_of(param_dtype=torch.bfloat16), MIXED_ADAM, RANKS)
    assert mixed.cast is None, "they are in bf16 as it is"


def test_formulas_know_the_dtypes_of_the_model() -> None:
    def tokens(batch: int, length: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (torch.zeros(batch, length, WIDTH, dtype=torch.bfloat16),), {}

    asked = planner(memory_budget=0)
    asked = dataclasses.replace(asked, build=lambda: Layers().bfloat16(), inputs=tokens)
    plan = asked.plan((1, 3))
    assert _precision(plan.precision) == "bf16 with AdamW (2+2+4 bytes a parameter)"
    for cast, (stage, found) in itertools.product((None, torch.bfloat16), plan.stages.items()):
        rates = Rates.of(found, config_of(param_dtype=cast), plan.precision, RANKS)
        numbers = {PSI: plan.num_params, W: RANKS}
        states, held = rates.states(), found.forecast.resident.states
        assert states.params.subs(numbers) == held.params, stage
        assert states.optimizer.subs(numbers) == held.optimizer, stage
        assert found.sent_bytes == pytest.approx(float(rates.sent().subs(numbers)), rel=0.08)
    adapted = Layers().bfloat16()
    adapted.layers[0].float()
    adapted.layers[1:].requires_grad_(False)
    mean = precision_of(describe_params(adapted), FP32_ADAM)
    assert (float(mean.param), mean.grad, mean.optimizer) == (2.4, 4, 8)
    assert _precision(mean) == "fp32 and bf16 with AdamW (2.4+4+8 bytes a parameter)"


def test_nodes_of_more_ranks_than_there_are() -> None:
    codes = {"quantize_gradients": ("int8", "int4")}
    sent = []
    for per_node in (RANKS, 2 * RANKS):
        asked = planner(ranks_per_node=per_node, **codes)
        found = asked.plan((3,)).stages[3]
        sent.append(Rates.of(found, asked.config, FP32_ADAM, RANKS).sent())
    assert sent[0] == sent[1]


@pytest.mark.parametrize(("per_node", "leaves"), [(RANKS, False), (2, True)])
def test_replicas_on_one_node_send_nothing_between_nodes(per_node: int, leaves: bool) -> None:
    asked = planner(replicate=2, ranks_per_node=per_node)
    assert (asked.plan((3,)).stages[3].across_bytes > 0) is leaves
    coded = planner(replicate=2, ranks_per_node=per_node, quantize_gradients="int8")
    assert (coded.plan((3,)).stages[3].across_bytes > 0) is leaves


@pytest.mark.parametrize(
    ("options", "gathered", "reduced"),
    [
        ({"stage": 0}, 0, 1),
        ({"stage": 1}, 1, 1),
        ({"stage": 2}, 1, 4),
        ({"stage": 3, "memory_budget": 0}, 4, 4),
    ],
    ids=str,
)
def test_a_step_of_four_micro_batches(options: dict[str, Any], gathered: int, reduced: int) -> None:
    """As docs/accounting.md measures: resident copies and held-back gradients travel once."""
    once, found = explained(**options), explained(**options, accumulate=4)
    runs = {
        region: {each.runs for each in found.collectives if each.region == region}
        for region in ("forward", "backward")
    }
    assert runs["forward"] == ({gathered} if gathered else set())
    assert runs["backward"] == {reduced}
    wanted = sum(
        each.wire_bytes * (gathered if each.region == "forward" else reduced)
        for each in once.collectives
    )
    assert found.outcome.sent_bytes == wanted == sum(e.wire_bytes for e in found.collectives)
    assert found.outcome.num_collectives == sum(e.runs for e in found.collectives)
    assert found.outcome.times.compute == pytest.approx(4 * once.outcome.times.compute)
    spent = found.outcome.times.exposed / once.outcome.times.exposed
    assert spent == pytest.approx(4) if gathered == reduced == 4 else 0.9 < spent < 4


def test_replicas_share_means_once_a_step() -> None:
    hybrid = {"replicate": 2, "stage": 3, "memory_budget": 0}
    once, found = explained(**hybrid), explained(**hybrid, accumulate=2)
    model = 5 * LAYER
    reduced = [
        sum(each.wire_bytes for each in one.collectives if each.name.startswith("reduce"))
        for one in (once, found)
    ]
    # Each micro-batch scatters half of the model; the other half of it goes to the replica once.
    assert reduced == [model // 2 + model // 2, 2 * (model // 2) + model // 2]


def test_choices_know_casts_budgets_and_sums_that_wait() -> None:
    ways = algorithms_for("gloo", "cpu", RANKS, RANKS)
    model = 5 * LAYER

    def peaks(**options: Any) -> dict[int, int]:
        rehearsal = rehearsed(cast=options.get("param_dtype"))
        return dict(predicted_peaks(rehearsal, config_of(**options), RANKS, ways))

    plain, kept = peaks(bucket_bytes=0), peaks(bucket_bytes=0, memory_budget=model)
    assert kept[3] > plain[3] and [kept[n] for n in (0, 1, 2)] == [plain[n] for n in (0, 1, 2)]
    held = peaks(bucket_bytes=0, accumulate=2)
    assert held[0] > plain[0] + 1.75 * model, ".grad, and the sum that waits"
    assert held[1] >= plain[1] + model and held[3] < plain[3] + model


def test_explanations_refuse_what_they_do_not_plan_and_know_registered_passes() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel does not go with explain"):
        explained(sequence_parallel=2)
    x, config = torch.zeros(4, 64), config_of()
    with zerofx.register_pass(without("schedule")):
        found = zerofx.explain(Net(), x, config=config, world_size=4)
    assert "schedule" not in found.texts["forward"]
    assert "schedule" in zerofx.explain(Net(), x, config=config, world_size=4).texts["forward"]
