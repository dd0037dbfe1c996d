"""`zerofx.explain`: its figures are those of the program, and change when the program does."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zerofx
from tests.debug.trained import Net, Talkative
from zerofx.cost.compute import Roofline
from zerofx.cost.link import Link
from zerofx.cost.machine import Machine
from zerofx.debug.changes import Search
from zerofx.debug.explain_text import as_data, as_text
from zerofx.debug.explanation import Explanation
from zerofx.errors import ConfigError, UnsupportedError

MACHINE = Machine("cpu", Roofline(50e9, 10e9), Link(10e9, 20e-6))


@functools.cache
def explained(depth: int = 2, link: float = 10e9, **options: Any) -> Explanation:
    machine = dataclasses.replace(MACHINE, link=Link(link, 20e-6))
    config = zerofx.ZeroConfig(inner="eager", dump="", **options)
    x = torch.zeros(4, 64)
    return zerofx.explain(Net(depth), x, config=config, world_size=4, machine=machine)


def searched(found: Explanation) -> Search:
    assert found.search is not None
    return found.search


def rows(found: Explanation) -> dict[str, str]:
    """The screen by the first word of its rows; collectives and changes each as one."""
    head, captured, step, collectives, changes = as_text(found)
    lines = step.splitlines()
    named = {line.split()[0]: line for line in lines if not line.startswith(" ")}
    parts = next(line for line in lines if "in flight" in line)
    return {
        "head": head,
        "captured": captured,
        "collectives": collectives,
        "changes": changes,
        "parts": parts,
        **named,
    }


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"bucket_bytes": 0}, {"head", "captured"}),
        ({"link": 1e9}, {"captured", "peak", "parts", "sent"}),
        ({"depth": 3}, {"head"}),
        ({"stage": 1}, {"captured"}),
    ],
    ids=["bucket_bytes", "link", "depth", "stage"],
)
def test_every_figure_changes_with_the_program(changed: dict[str, Any], same: set[str]) -> None:
    before, after = rows(explained()), rows(explained(**changed))
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] == after[name]} == same


def test_figures_agree_with_each_other() -> None:
    found = explained()
    outcome, collectives = found.outcome, found.collectives
    assert sum(each.wire_bytes for each in collectives) == outcome.sent_bytes
    assert len(collectives) == outcome.num_collectives
    with torch.inference_mode():
        assert explained.__wrapped__().outcome == outcome
    assert sum(each.exposed for each in collectives) == pytest.approx(outcome.times.exposed)
    for each in collectives:
        assert 0 <= each.exposed <= each.seconds and each.hidden >= 0
        assert each.seconds == pytest.approx(20e-6 + each.wire_bytes / 10e9)
    data = as_data(found)
    assert data["step_seconds"] == outcome.times.step and data["peak_bytes"] == outcome.peak.total
    assert sum(outcome.peak.__dict__[part] for part in ("params", "grads", "optimizer")) > 0


def test_reports_and_the_screen_know_the_same_machine() -> None:
    found = explained(link=1e8)
    seconds = {
        (region, each["node"]): (each["seconds"], each["exposed_seconds"])
        for region, report in found.reports.items()
        for each in report["collectives"]
    }
    for each in found.collectives:
        shown = seconds[each.region, each.name]
        assert shown == pytest.approx((each.seconds, each.exposed), abs=1e-8)


def test_changes_are_planned_and_their_gains_are_those_of_their_programs() -> None:
    found = explained(link=1e9)
    best = {change.option: change for change in searched(found).best}
    assert 0 < len(best) <= 3 and searched(found).tried > 10
    gains = [change.worth for change in searched(found).best]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0
    assert "bucket_bytes" in best, "a latency of 20 µs for small buckets"
    size = int(best["bucket_bytes"].value)
    really = explained(link=1e9, bucket_bytes=size).outcome
    assert really.times.step == best["bucket_bytes"].seconds
    assert really.peak == best["bucket_bytes"].outcome.peak


def test_memory_rules_out_what_does_not_fit() -> None:
    x, config = torch.zeros(4, 64), zerofx.ZeroConfig(inner="eager", dump="")
    peak = explained().outcome.peak.total
    ask = functools.partial(zerofx.explain, Net(), x, config=config, world_size=4, machine=MACHINE)
    tight = ask(memory_bytes=peak)
    assert all(c.outcome.peak.total <= peak for c in searched(tight).best)
    crowded = ask(memory_bytes=peak // 2)
    assert "too much for" in str(crowded)
    freed = [change.memory_gain for change in searched(crowded).best]
    assert freed == sorted(freed, reverse=True) and freed[-1] > 0


def test_a_cast_of_parameters_halves_what_is_sent() -> None:
    half = explained(param_dtype=torch.bfloat16)
    assert half.outcome.sent_bytes == explained().outcome.sent_bytes / 2
    assert "param_dtype" not in {change.option for change in searched(half).best}


def test_the_model_is_neither_run_nor_changed() -> None:
    class Counts(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            assert torch.compiler.is_compiling()
            return super().forward(x)

    model = Counts()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    zerofx.explain(model, torch.zeros(4, 64), config=zerofx.ZeroConfig(inner="eager"))
    for name, param in model.named_parameters():
        assert id(param) == before[name][0] and torch.equal(param, before[name][1])
        assert param.grad is None


def test_breaks_name_the_line_and_the_remedy() -> None:
    config = zerofx.ZeroConfig(inner="eager", dump="")
    found = zerofx.explain(Net(talks=True), torch.zeros(4, 64), config=config)
    first, found_break = found.captured.breaks
    assert found.captured.graphs == found.captured.training == 2
    assert first.place.code == 'print("before any operation")'
    assert found_break.place.code == 'print("between two graphs")'
    assert found_break.place.file.endswith("tests/debug/trained.py")
    assert "print" in found_break.reason and "reorderable_logging" in found_break.remedy
    # Both graphs count: nothing of the model is lost to the break.
    whole = zerofx.explain(Net(), torch.zeros(4, 64), config=config)
    assert found.outcome.sent_bytes >= whole.outcome.sent_bytes
    assert {each.graph for each in found.collectives} == {0, 1}


def test_a_graph_counts_as_often_as_a_step_runs_it() -> None:
    x = torch.zeros(4, 64, requires_grad=True)  # the first block is like the others
    (found, deep), (kept, deep_kept), (_, all_kept) = (
        [zerofx.explain(Talkative(depth), x, config=config, machine=MACHINE) for depth in (1, 4)]
        for budget in (0, None, 1 << 30)
        for config in [zerofx.ZeroConfig(inner="eager", dump="", memory_budget=budget)]
    )
    assert found.captured.graphs == deep.captured.graphs
    assert {each.runs for each in deep.collectives} == {4.0}
    assert deep.outcome.sent_bytes == 4 * found.outcome.sent_bytes > 0
    assert deep.outcome.num_collectives == 4 * found.outcome.num_collectives
    assert deep.outcome.times.exposed == pytest.approx(4 * found.outcome.times.exposed)
    assert deep.outcome.peak.activations > found.outcome.peak.activations
    assert sum(each.wire_bytes for each in deep.collectives) == deep.outcome.sent_bytes
    # Of four blocks only the last one's values are kept, unless there is room for all.
    saved = found.outcome.sent_bytes - kept.outcome.sent_bytes
    sent = [each.outcome.sent_bytes for each in (deep_kept, all_kept)]
    assert saved > 0 and sent == [deep.outcome.sent_bytes - n * saved for n in (1, 4)]
    assert {1.0, 3.0, 4.0} >= {each.runs for each in deep_kept.collectives} > {4.0}
    peaks = [each.outcome.peak.gathered for each in (kept, deep_kept, all_kept)]
    assert peaks[0] == peaks[1] < peaks[2]
    text = "\n".join(as_text(deep))
    assert "×4" in text and "missing" in text
    assert "missing" not in "\n".join(as_text(explained()))


def test_a_branch_on_values_ends_the_rehearsal() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            if y.sum() > 0:
                y = y * 2
            return self.two(y).sum()

    config = zerofx.ZeroConfig(inner="eager", dump="")
    found = zerofx.explain(Branches(), torch.zeros(4, 64), config=config)
    assert found.captured.stopped and "torch.where" in found.captured.breaks[0].remedy
    assert "wants more than shapes" in str(found)


def test_why_and_until() -> None:
    found = explained(depth=3)
    (forward, backward) = found.why("unshard.blocks.1")
    assert (forward.region, backward.region) == ("forward", "backward")
    by_pass = {each.by: each for each in forward.decisions}
    assert "blocks.2" in by_pass["fuse_unshards"].text and by_pass["fuse_unshards"].taken
    assert "budget" in by_pass["keep_unsharded"].text and not by_pass["keep_unsharded"].taken
    assert {each.by for each in backward.decisions} == {"fuse_unshards", "schedule"}
    last = {each.by: each for each in found.why("unshard.blocks.2")[0].decisions if not each.taken}
    assert "over the budget" in last["schedule"].text
    (kept,) = found.why("keep.blocks.2.up.weight")
    assert any(each.text.startswith("kept: ") and each.taken for each in kept.decisions)
    assert [each.region for each in found.why("backward:unshard.blocks.1")] == ["backward"]
    until = found.until("insert_unshards")
    assert until["forward"] != found.until("fuse_unshards")["forward"]
    assert "# wire=" in until["forward"] and "shard4" in until["forward"]
    assert list(found.until("merge_unshards")) == ["joint"]


def test_questions_about_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'unshard\.blocks\.0'"):
        explained().why("unshard.block.0")
    with pytest.raises(ConfigError, match="keep_unsharded"):
        explained().until("bucketing")
    frozen = Net().requires_grad_(False)
    with pytest.raises(UnsupportedError, match="no backward"):
        zerofx.explain(frozen, torch.zeros(4, 64))


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"world_size": 0}, "world_size=0 is not allowed"),
        ({"world_size": "4"}, "world_size is '4', of type str"),
        ({"link": 1e9}, "link is 1000000000.0, of type float"),
        ({"link": "fast"}, "'fast' is not a rate"),
        ({"model": len}, "of type builtin_function_or_method"),
        ({"config": {"stage": 3}}, "of type dict"),
        ({"machine": "cpu"}, "machine is 'cpu', of type str"),
        ({"memory_bytes": "1GB"}, "memory_bytes is '1GB'"),
    ],
    ids=str,
)
def test_arguments_are_looked_at(argument: dict[str, Any], said: str) -> None:
    model = argument.pop("model", Net())
    with pytest.raises(ConfigError) as refused:
        zerofx.explain(model, torch.zeros(4, 64), **argument)
    assert said in str(refused.value) and "Remedy: " in str(refused.value)


def test_a_rate_is_a_link_and_ranks_are_those_of_the_mesh() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2], _init_backend=False, _rank=0)
    config = zerofx.ZeroConfig(inner="eager", mesh=mesh, dump="")
    machine = dataclasses.replace(MACHINE, reductions=Link(1.0, 1.0))
    x = torch.zeros(4, 64)
    found = zerofx.explain(Net(), x, config=config, machine=machine, link="1gbit")
    assert found.setting.machine.link == Link(125e6, 20e-6)
    assert found.setting.machine.reductions is None
    assert "zero3 on 3 ranks (cpu)" in str(found)


@pytest.mark.parametrize("inputs", [(), (torch.zeros(4, 32),), (1, 2, 3)], ids=["no", "32", "3"])
def test_inputs_that_do_not_fit_are_not_taken_for_a_frozen_model(inputs: tuple[Any, ...]) -> None:
    config = zerofx.ZeroConfig(inner="eager", dump="")
    with pytest.raises(UnsupportedError, match="forward of Net fails with these inputs: ") as left:
        zerofx.explain(Net(), *inputs, config=config)
    assert "trainable" not in str(left.value)


def test_codes_and_hops_of_collectives() -> None:
    """Wire dtype, scales, bytes inside and between nodes, each from the option that makes it."""
    base = {"ranks_per_node": 2, "quantize_exact": (), "min_shard_numel": 0}

    def found(**options: Any) -> tuple[str, dict[str, Any]]:
        each = explained(**base, **options)
        sizes = sorted(each.collectives, key=lambda one: one.wire_bytes)
        by_kind = {one.name.partition(".")[0] + one.region: one for one in sizes}
        return rows(each)["collectives"], by_kind

    numbers, exact = found()
    text, coded = found(quantize_weights="int8x64", quantize_gradients=("int8x64", "int4x64"))
    assert exact["unshardforward"].wire_dtype == "float32" and "as" in numbers.split()
    gather, reduce = coded["unshardforward"], coded["reducebackward"]
    assert gather.wire_dtype == "int8x64" and reduce.wire_dtype == "int8x64 → int4x64"
    assert reduce.wire_dtype in text
    assert gather.scale_bytes > 0 == exact["unshardforward"].scale_bytes
    # Four ranks, two a node: of three chunks one leaves the node.
    assert gather.across_bytes == pytest.approx(gather.wire_bytes / 3, abs=1)
    assert reduce.across_bytes < reduce.wire_bytes / 4, "half as long codes between nodes"
    _, coded = found(quantize_weights="int8x64", quantize_gradients="int4x64")
    assert coded["reducebackward"].wire_dtype == "int4x64 → int4x64", "both hops, alike as they are"
    _, inside = found(quantize_weights="int8x64", secondary_shards="codes")
    assert inside["unshardbackward"].across_bytes == 0 < inside["unshardbackward"].scale_bytes
