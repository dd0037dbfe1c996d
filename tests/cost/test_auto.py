"""`quantize="auto"`: codes travel where they save more time on the link than their kernels take."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.hard.pair import EAGER
from tests.hard.wire import watched
from tests.ranks import run_ranks
from zerofx.config import ZeroConfig
from zerofx.cost.compute import Roofline
from zerofx.cost.link import Link
from zerofx.cost.machine import Machine
from zerofx.debug.explain_text import why_text
from zerofx.debug.explanation import explain_model
from zerofx.debug.outcome import Setting
from zerofx.errors import ConfigError
from zerofx.frontend.rehearsal import Rehearsal, rehearse_model
from zerofx.ir.program import Program
from zerofx.ir.text import print_program
from zerofx.passes.pipelines import pipeline
from zerofx.passes.quantize import Weighed

WIDTH = 256
SLOW = Machine("cpu", Roofline(), Link(125e6, 1e-4))
"""1 Gbit/s."""
FAST = Machine("cpu", Roofline(), Link(10e9, 2e-5))
"""Loopback."""
AUTO = ZeroConfig(quantize="auto", inner="eager", bucket_bytes=0)
WEIGHTS, GRADS = "quantize_unshards", "quantize_reduces"


def stack() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)]
    return nn.Sequential(*layers)


@functools.cache
def rehearsed(rows: int = 8) -> Rehearsal:
    return rehearse_model(stack, lambda: ((torch.zeros(rows, WIDTH),), {}), "eager")


def _found(machine: Machine, config: ZeroConfig = AUTO, rows: int = 8) -> dict[str, Weighed]:
    return dict(rehearsed(rows).weighed(config, 4, machine))


def _pays(machine: Machine, config: ZeroConfig = AUTO, rows: int = 8) -> dict[str, bool]:
    return {name: each.pays for name, each in _found(machine, config, rows).items()}


def _without_notes(program: Program) -> list[str]:
    return [line.partition("  #")[0] for line in print_program(program).splitlines()]


def test_on_over_a_slow_link_and_off_over_a_fast_one() -> None:
    assert _pays(SLOW) == {WEIGHTS: True, GRADS: True}
    assert _pays(FAST) == {WEIGHTS: False, GRADS: False}
    always = dataclasses.replace(
        AUTO, quantize=None, quantize_weights="int8", quantize_gradients="int8"
    )
    for machine, config in ((SLOW, always), (FAST, ZeroConfig(inner="eager", bucket_bytes=0))):
        chosen = rehearsed().programs(AUTO, 4, machine=machine)
        wanted = rehearsed().programs(config, 4)
        assert list(map(_without_notes, chosen)) == list(map(_without_notes, wanted))


def test_each_kind_of_codes_is_weighed_for_itself() -> None:
    assert _pays(dataclasses.replace(SLOW, reductions=FAST.link)) == {WEIGHTS: True, GRADS: False}
    named = dataclasses.replace(AUTO, quantize_gradients="int4x64")
    assert _pays(SLOW, named) == {GRADS: True}, "only what is named, if anything is"
    assert _pays(SLOW, dataclasses.replace(AUTO, stage=2)) == {GRADS: True}


def test_what_computation_hides_saves_nothing() -> None:
    crawling = dataclasses.replace(SLOW, roofline=Roofline(flops=1e6, bytes_per_second=10e9))
    assert _pays(crawling) == {WEIGHTS: False, GRADS: False}


def test_figures_are_those_of_link_and_memory() -> None:
    def first(machine: Machine) -> Any:
        return next(b for b in _found(machine)[WEIGHTS].buckets if "1.0.weight" in b.members)

    numel, base = WIDTH * WIDTH, first(SLOW)
    assert base.exact == pytest.approx(1e-4 + 3 / 4 * numel * 4 / 125e6)
    assert base.coded == pytest.approx(1e-4 + 3 / 4 * numel * (1 + 4 / 256) / 125e6)
    codes = numel * (1 + 4 / 256)
    moved = (4 * numel + codes) / 4 + 4 * numel + codes  # packs its own, and unpacks all
    assert base.kernels == pytest.approx(moved / 10e9)
    other = first(Machine("cpu", Roofline(50e9, 20e9), Link(250e6, 0.0)))
    assert other.kernels == pytest.approx(base.kernels / 2)
    assert other.exact == pytest.approx((base.exact - 1e-4) / 2)
    assert base.exposed > other.exposed > 0


def test_codes_are_exchanged_over_a_link_of_their_own() -> None:
    worse = dataclasses.replace(SLOW, all_to_alls=Link(1e6, 1e-4))
    assert _pays(worse) == {WEIGHTS: True, GRADS: False}
    before, after = (_found(each)[GRADS].buckets[0] for each in (SLOW, worse))
    assert after.exact == before.exact, "numbers do not go that way"
    assert after.coded > 10 * before.coded


def test_explain_says_why() -> None:
    for machine, sign, word in ((SLOW, "+", "codes: they"), (FAST, "–", "numbers: codes would")):
        found = explain_model(
            stack(), (torch.zeros(8, WIDTH),), {}, Setting(AUTO, 4, machine), changes=False
        )
        weighed = _found(machine)[WEIGHTS]
        assert f"auto        weights travel as {word[: word.index(':')]}" in str(found)
        text = why_text(found.why("forward:unshard.1.0.weight"))
        why = next(reason for what, reason in weighed.reasons if "unshard.1.0.weight" in what)
        assert f"  {sign} quantize_unshards {why}" in text and word in why
        entry = found.reports["forward"]["passes"]
        plan = next(each["plan"] for each in entry if each["name"] == WEIGHTS)
        assert plan["weighed"]["pays"] is weighed.pays
        assert plan["weighed"]["coded"] == pytest.approx(weighed.coded)


def test_refused_where_nothing_travels_as_codes() -> None:
    with pytest.raises(ConfigError, match=r"option quantize has no meaning at stage 0"):
        pipeline(ZeroConfig(stage=0, quantize="auto"))
    with pytest.raises(ConfigError, match=r"(?s)quantize='always'.*\"auto\""):
        ZeroConfig(quantize="always")  # type: ignore[arg-type]


def _sent(rows: tuple[int, int], folder: str) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """What travels in training and in evaluation, if ranks have batches of other sizes."""
    model = stack()
    options = {**EAGER, "quantize": "auto", "dump": folder}
    run = torch.compile(model, backend="zero3", options=options, dynamic=False)
    mine = rows[dist.get_rank()]
    run(torch.randn(mine, WIDTH)).sum().backward()
    with watched() as trained:
        # Only one rank compiles anew.
        run(torch.randn(mine + dist.get_rank(), WIDTH)).sum().backward()
    with torch.no_grad(), watched() as evaluated:
        run(torch.randn(mine, WIDTH))
    return trained.dtypes, evaluated.dtypes


def test_ranks_do_what_rank_0_finds(tmp_path: Path) -> None:
    few, many = 2, 2048
    machine = Machine("cpu", Roofline(), Link(1e9, 1e-4))
    config = ZeroConfig(quantize="auto", inner="eager")
    assert not any(_pays(machine, config, many).values()), "of its own the other rank would not"
    for trained, evaluated in run_ranks(2, _sent, (few, many), str(tmp_path), timeout=120):
        assert torch.uint8 in trained and torch.uint8 in evaluated
    reports = tmp_path.glob("graph*/report.json")
    report = min(reports, key=lambda each: int(each.parent.name.removeprefix("graph")))
    programs = json.loads(report.read_text())["programs"]
    plans = {each["name"]: each["plan"] for program in programs for each in program["passes"]}
    assert plans[WEIGHTS]["weighed"]["pays"] and plans[GRADS]["reasons"][0][1].startswith("codes")
