"""Model states are those of the ZeRO paper, and exact for real parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from zerofx.config import ZeroConfig
from zerofx.cost.machine import machine_of
from zerofx.cost.memory import (
    FP32_ADAM,
    MIXED_ADAM,
    PSI,
    W,
    formula,
    states,
    wire_formula,
)
from zerofx.frontend.layouts import describe_params
from zerofx.frontend.planner import Plan, Planner
from zerofx.frontend.resident import rest_of
from zerofx.ir.spec import Layout, ParamSpec

# ZeRO, table 1: GB on each device at stages 1, 2 and 3, by parameters and ranks.
TABLE_1 = {
    (7.5e9, 4): (52.5, 41.3, 30),
    (7.5e9, 16): (35.6, 21.6, 7.5),
    (7.5e9, 64): (31.4, 16.6, 1.88),
    (7.5e9, 256): (30.4, 15.4, 0.47),
    (7.5e9, 1024): (30.1, 15.1, 0.12),
    (128e9, 4): (896, 704, 512),
    (128e9, 16): (608, 368, 128),
    (128e9, 64): (536, 284, 32),
    (128e9, 1024): (513, 257, 2),
    (1e12, 4): (7000, 5500, 4000),
    (1e12, 16): (4750, 2875, 1000),
    (1e12, 64): (4187, 2218, 250),
    (1e12, 1024): (4011, 2013, 15.6),
}


def _gigabytes(stage: int, num_params: float, num_ranks: int) -> float:
    total = formula(stage, MIXED_ADAM).total
    return float(total.subs({PSI: num_params, W: num_ranks})) / 1e9


def test_figure_1_of_the_paper() -> None:
    found = [_gigabytes(stage, 7.5e9, 64) for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.015)


@pytest.mark.parametrize("case", TABLE_1, ids=str)
def test_table_1_of_the_paper(case: tuple[float, int]) -> None:
    found = [_gigabytes(stage, *case) for stage in (1, 2, 3)]
    assert found == pytest.approx(TABLE_1[case], rel=0.025)


def test_formulas_are_expressions() -> None:
    assert formula(3, MIXED_ADAM).total.equals(16 * PSI / W)
    assert formula(1, MIXED_ADAM).total.equals(4 * PSI + 12 * PSI / W)
    assert formula(2, FP32_ADAM).total.equals(4 * PSI + 12 * PSI / W)
    assert wire_formula(3, FP32_ADAM).equals(12 * PSI * (W - 1) / W)


def test_exact_states_count_padding_and_leave_frozen_parameters_alone() -> None:
    def spec(name: str, *, trainable: bool, layout: Layout) -> ParamSpec:
        return ParamSpec(name, 0, torch.Size((7, 5)), torch.float32, trainable, layout)

    sharded, resident = Layout(1, 4, 1, resident=False), Layout(1, 4, 1, resident=True)
    found = states([spec("a", trainable=True, layout=sharded)], FP32_ADAM)
    assert (found.params, found.grads, found.optimizer) == (40, 40, 80)  # two rows of five
    found = states([spec("a", trainable=False, layout=resident)], FP32_ADAM)
    assert (found.params, found.grads, found.optimizer) == (160, 0, 0)  # eight rows
    found = states([spec("a", trainable=True, layout=resident)], MIXED_ADAM)
    assert (found.params, found.grads, found.optimizer) == (160, 40, 120)


def test_secondary_shards_are_a_share_of_the_node_in_the_dtype_of_computation() -> None:
    layout = Layout(1, 4, 1, resident=False, node_size=2, secondary=True)
    spec = ParamSpec(
        "a", 0, torch.Size((7, 5)), torch.float32, True, layout, param_dtype=torch.bfloat16
    )
    found = states([spec], FP32_ADAM)
    assert (found.params, found.grads) == (40 + 18 * 2, 40)  # 35 elements on two ranks


class _Adapted(nn.Module):
    """A frozen layer of 64 x 128, and a trainable one of 128 x 64."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(128, 64, bias=False).requires_grad_(False)
        self.top = nn.Linear(64, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(torch.tanh(self.base(x))).square().mean()


class _Small(nn.Module):
    """Two layers whose gradients outweigh a sample, and shards of nothing on most ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


def _plan_of_small(num_ranks: int, device: str = "cuda") -> Plan:
    return Planner(
        _Small,
        lambda batch, length: ((torch.empty(batch, 64),), {}),
        ZeroConfig(),
        machine_of(device),
        FP32_ADAM,
        *(num_ranks, 1, 1),
    ).plan()


def test_activations_are_affine_where_communication_has_the_peak() -> None:
    """Two rows of 64 floats: the output and the input, or what was computed from it."""
    for stage in _plan_of_small(4096).stages.values():
        for line in (stage.forecast.forward, stage.forecast.backward):
            assert (line.base[:, 0] >= 0).all() and (line.slope[:, 0] % 256 == 0).all()
        peak, (base, slope) = stage.forecast.peak(1), stage.forecast.activations(1)
        assert peak.activations == base + slope > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_an_optimizers_temporaries_are_as_wide_as_its_state(dtype: torch.dtype) -> None:
    params = describe_params(_Small().to(dtype))
    numel, largest = 2 * (64 * 64 + 64), 64 * 64
    for device, numbers in (("cuda", numel), ("cpu", 2 * largest)):
        for precision, size in ((FP32_ADAM, dtype.itemsize), (MIXED_ADAM, 4)):
            _, held = rest_of(
                params,
                ZeroConfig(),
                1,
                precision=precision,
                buffers=0,
                device=device,
                coded=(),
                accumulates=False,
            )
            assert held.step == size * numbers


class _Convolution(nn.Module):
    """Its backward is one kernel, which makes a gradient to go on with and two of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def test_gradients_of_a_kernel_with_several_outputs_are_gradients() -> None:
    plan = Planner(
        _Convolution,
        lambda batch, length: ((torch.empty(batch, 4, 16, 16),), {}),
        ZeroConfig(min_shard_numel=0),
        machine_of("cpu"),
        FP32_ADAM,
        *(2, 1, 1),
    ).plan()
    for number in (2, 3):
        grads = plan.stages[number].forecast.backward.at(1)[:, 1]
        shards = 4 * plan.num_params // 2
        assert grads[-1] == shards and (grads >= 0).all()
        assert grads.max() > shards  # full ones too


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_one_rank_has_its_gradients_once(device: str) -> None:
    plan = _plan_of_small(1, device)
    for stage in plan.stages.values():
        assert stage.forecast.peak(1).grads == 4 * plan.num_params
        assert stage.forecast.backward.at(1)[:, 1].max() == 4 * plan.num_params


def test_plans_count_codes_of_frozen_weights_and_errors_of_feedback() -> None:
    """Two nodes of two ranks: a byte a number in blocks of 256, and 16 bytes for four scales."""
    codes = 2048 + 8 * 4  # a quarter of the frozen layer
    inside, across = 4 * codes, 2 * codes  # four parcels of the other one; two of their means
    for gradients, kept in (
        ("int8", codes),
        ("int8.feedback", codes + inside + across),
        (("int8", "int4.feedback"), codes + across),
    ):
        config = ZeroConfig(
            inner="eager",
            quantize_weights="int8",
            quantize_gradients=gradients,
            ranks_per_node=2,
        )
        plan = Planner(
            _Adapted,
            lambda batch, length: ((torch.empty(batch, 128),), {}),
            config,
            machine_of("cpu"),
            FP32_ADAM,
            *(4, 2, 1),
        ).plan((3,))
        forecast = plan.stages[3].forecast
        assert forecast.resident.codes == kept
        without = dataclasses.replace(
            forecast, resident=dataclasses.replace(forecast.resident, codes=0)
        )
        assert forecast.peak(2).total - without.peak(2).total == kept
        assert forecast.largest_batch(1 << 24) < without.largest_batch(1 << 24)
