"""`zerofx plan` end to end, in one process, without a device."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from zerofx.cli.main import main
from zerofx.cost.compute import Roofline
from zerofx.cost.host import Host
from zerofx.cost.link import Link
from zerofx.cost.machine import Machine, loads_machine
from zerofx.cost.processor import Processor
from zerofx.frontend.rehearsal import Rehearsal, rehearse_model
from zerofx.torch_private import fake_mode

GPT = ["plan", "benchmarks.gpt:Gpt(depth=1)", "--batch", "2", "--length", "32"]
DOCS = Path(__file__).parents[2] / "docs" / "plan.md"


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    """Plans of one model and of equal inputs share what was traced: most of their time."""
    traced: dict[object, Rehearsal] = {}

    def rehearse(build: Any, inputs: Any, *how: Any) -> Rehearsal:
        with fake_mode():
            model, (args, kwargs) = build(), inputs()
        values = (*args, *kwargs.values(), *model.parameters())
        key = (repr(model), *((each.shape, each.dtype) for each in values), *kwargs, *how)
        if key not in traced:
            traced[key] = rehearse_model(build, inputs, *how)
        return traced[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerofx.frontend.planner.rehearse_model", rehearse)
        yield


def _plan(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    code = main([*GPT, *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan = _plan(capsys, "--world-size", "64", "--memory", "16MB")
    peaks = {int(stage): found["peak_bytes"] for stage, found in plan["stages"].items()}
    assert code == 0 and plan["stage"] == min(stage for stage in peaks if peaks[stage] <= 16e6)
    assert peaks[0] > 16e6, "everything fits"
    for stage, found in plan["stages"].items():
        assert (found["largest_batch"] >= 2) == (peaks[int(stage)] <= 16e6)
    _, one = _plan(capsys, "--world-size", "64", "--memory", "16MB", "--stage", "3")
    assert one["stages"]["3"] == plan["stages"]["3"]  # stages do not depend on each other
    code, none = _plan(capsys, "--world-size", "4096", "--memory", "1MB")
    assert code == 1 and none["stage"] is None


def test_traffic_is_that_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    _, plan = _plan(capsys, "--world-size", "64")
    share = 4 * plan["num_params"] * 63 / 64
    for stage, times in (("0", 2), ("1", 2), ("2", 2)):
        assert plan["stages"][stage]["sent_bytes"] == pytest.approx(times * share, rel=0.01)
    # The last bucket is kept, and not gathered again: all but the table of 1024 tokens.
    kept = share * (1 - 1024 * 256 / plan["num_params"])
    assert plan["stages"]["3"]["sent_bytes"] == pytest.approx(3 * share - kept, rel=0.01)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_no_byte_is_waited_for_twice(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, plan = _plan(capsys, "--latency", "0", "--link", "1GB/s", "--stage", stage)
    found = plan["stages"][stage]
    assert 0.5 < found["exposed_seconds"] / (found["sent_bytes"] / 1e9) <= 1.0 + 1e-9


def test_secondary_shards_spare_the_link_between_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = ("--world-size", "64", "--ranks-per-node", "8", "--stage", "3", "--precision", "mixed")
    _, plan = _plan(capsys, *nodes)
    without = plan["stages"]["3"]
    _, plan = _plan(capsys, *nodes, "--secondary-shards")
    found, psi = plan["stages"]["3"], plan["num_params"]
    assert found["states_formula"] == "Ψ/4 + 16*Ψ/W"
    assert found["params"] - without["params"] == pytest.approx(2 * psi / 8, rel=0.01)
    # Of a rank's 63 chunks seven leave its node; backward's gather sends none of them.
    assert without["across_nodes_bytes"] == pytest.approx(without["sent_bytes"] * 7 / 63, rel=0.01)
    assert found["across_nodes_bytes"] == pytest.approx(2 * 2 * psi * 7 / 64, rel=0.01)


def test_the_largest_batch_is_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    _, plan = _plan(capsys, "--memory", "80MB", "--stage", "3")
    most = plan["stages"]["3"]["largest_batch"]
    peaks = []
    for batch in (most, most + 1):
        _, at = _plan(capsys, "--memory", "80MB", "--stage", "3", "--batch", str(batch))
        peaks.append(at["stages"]["3"]["peak_bytes"])
    assert peaks[0] <= 80e6 < peaks[1]


def test_a_measured_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = tmp_path / "machine.json"
    host = Host(program=1.0, collective=2.0, member=3.0, update=5.0, update_rate=1e30)
    machine = Machine("cpu", Roofline(1e30, 1e30), Link(1e30, 0.0), host=host)
    crowded = dataclasses.replace(host, processor=Processor(ranks_per_core=2.0, program=50.0))
    kept.write_text(dataclasses.replace(machine, host=crowded).dumps())
    assert loads_machine(kept.read_text()).host == crowded
    _, busy = _plan(capsys, "--machine", str(kept), "--stage", "2", "--world-size", "4")
    assert busy["stages"]["2"]["host_seconds"] >= 2 * 2 * 50.0
    kept.write_text(machine.dumps())
    assert loads_machine(kept.read_text()) == machine
    _, plan = _plan(capsys, "--machine", str(kept), "--stage", "2", "--world-size", "4")
    found = plan["stages"]["2"]
    _, other = _plan(capsys, "--stage", "2", "--world-size", "4")
    # Two programs; at least a gather and a reduction, and both waits of each parameter.
    assert found["host_seconds"] >= 2 * 1.0 + 2 * 2.0 + 2 * 8 * 3.0
    assert found["update_seconds"] == pytest.approx(5.0 * 8)
    assert other["stages"]["2"]["host_seconds"] == 0.0
    kept.write_text("{}")
    assert main([*GPT, "--machine", str(kept)]) == 2
    assert "zerofx bench machine" in capsys.readouterr().err


def test_param_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--world-size", "64", "--stage", "2", "--stage", "3")
    _, plain = _plan(capsys, *asked)
    _, half = _plan(capsys, *asked, "--param-dtype", "bfloat16")
    psi = plain["num_params"]
    for stage, found in half["stages"].items():
        before = plain["stages"][stage]
        assert found["sent_bytes"] == pytest.approx(before["sent_bytes"] / 2, rel=0.01)
        assert found["optimizer"] == pytest.approx(before["optimizer"], rel=0.01)
    # A resident copy in two bytes a parameter, and fp32 shards beside it.
    assert half["stages"]["2"]["params"] == pytest.approx(2 * psi + 4 * psi / 64, rel=0.02)
    assert half["stages"]["3"]["params"] == plain["stages"]["3"]["params"]


def _examples() -> list[tuple[str, str]]:
    """Commands of the documentation, and what they printed."""
    found = re.findall(r"```console\n\$ zerofx (.+?)\n(.*?)```", DOCS.read_text(), re.S)
    return [(command, text) for command, text in found]


@pytest.mark.slow
def test_the_transcripts_of_the_documentation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, since they share what is traced."""
    pytest.importorskip("transformers")
    import shlex

    monkeypatch.setenv("COLUMNS", "120")
    assert len(_examples()) >= 2
    for command, text in _examples():
        main(shlex.split(command))
        printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
        assert printed.strip() == text.strip()


def _wire(found: Any, region: str, kind: str) -> dict[str, dict[str, Any]]:
    rows = [row for row in found["wire"] if (row["region"], row["kind"]) == (region, kind)]
    return {row["wire_dtype"]: row for row in rows}


NODES = ("--world-size", "16", "--ranks-per-node", "4", "--stage", "3", "--quantize-exact", "ln*")


def test_codes_as_flags_and_both_hops(capsys: pytest.CaptureFixture[str]) -> None:
    codes = ("--quantize-weights", "int8", "--quantize-gradients", "int8,int4")
    _, plan = _plan(capsys, *NODES, *codes)
    found, psi = plan["stages"]["3"], plan["num_params"]
    gather, reduce = (
        _wire(found, *place)[dtype]
        for place, dtype in (
            (("forward", "gather"), "int8x256"),
            (("backward", "reduce"), "int8x256 → int4x256"),
        )
    )
    one, half = psi * 65 / 64, psi * 33 / 64  # bytes of the model in codes
    assert gather["sent_bytes"] == pytest.approx(one * 15 / 16, rel=0.03)
    assert gather["across_nodes_bytes"] == pytest.approx(one * 3 / 16, rel=0.03)
    assert gather["scale_bytes"] == pytest.approx(gather["sent_bytes"] / 65, rel=0.03)
    assert reduce["inside_node_bytes"] == pytest.approx(one * 3 / 4, rel=0.03)
    assert reduce["across_nodes_bytes"] == pytest.approx(half * 3 / 16, rel=0.03)
    assert set(_wire(found, "forward", "gather")) == {"int8x256"}, "every rank has norms whole"
    assert "float32" in _wire(found, "backward", "reduce"), "gradients of norms"
    assert sum(row["sent_bytes"] for row in found["wire"]) == found["sent_bytes"]
    main([*GPT, *NODES, *codes])
    text = capsys.readouterr().out
    assert "as int8x256 → int4x256, scales" in text
    formula = re.search(r"zero3  states .* sent (.*)", text)
    assert formula is not None
    hops = one * 2 * 15 / 16 + one * 3 / 4 + half * 3 / 16
    assert eval(formula[1], {"Ψ": psi, "W": 16}) == pytest.approx(hops)
    _, other = _plan(capsys, *NODES, "--quantize-weights", "int4x64")
    assert set(_wire(other["stages"]["3"], "forward", "gather")) == {"int4x64"}


def test_copies_in_codes_and_a_choice_left_open(capsys: pytest.CaptureFixture[str]) -> None:
    weights = ("--quantize-weights", "int8")
    found = {}
    for name, flags in (("numbers", ()), ("codes", ("=codes",))):
        copies = ["--secondary-shards" + "".join(flags)]
        _, plan = _plan(capsys, *NODES, *weights, *copies)
        found[name] = plan["stages"]["3"]
    psi = plan["num_params"]
    saved = found["numbers"]["params"] - found["codes"]["params"]
    assert saved == pytest.approx(psi / 4 * (4 - 65 / 64), rel=0.03)
    assert found["codes"]["states_formula"] == "65*Ψ/256 + 16*Ψ/W"
    back = _wire(found["codes"], "backward", "gather")["int8x256"]
    assert back["across_nodes_bytes"] == 0 < back["inside_node_bytes"]
    for link, dtype in (("1gbit", "int8x256"), ("1000GB/s", "float32")):
        machine = ("--link", link, "--device", "cpu", "--bandwidth", "10GB/s")
        _, plan = _plan(capsys, *NODES, "--quantize", "auto", *machine)
        stage = plan["stages"]["3"]
        assert dtype in _wire(stage, "forward", "gather")
        assert stage["auto"]["quantize_unshards"]["pays"] is (dtype != "float32")


@pytest.mark.parametrize("flags", [("--quantize-weights", "int8"), ("--secondary-shards",)])
def test_flags_that_mean_nothing_at_any_stage_asked_for(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GPT, *flags, "--stage", "1"]) == 2
    name = flags[0].removeprefix("--").replace("-", "_")
    assert name in capsys.readouterr().err
    code, _ = _plan(capsys, *flags, "--ranks-per-node", "2", "--stage", "1", "--stage", "3")
    assert code == 0


def test_nodes_that_ranks_would_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT, "--world-size", "8", "--ranks-per-node", "3"]) == 2
    assert "ranks_per_node=3 does not divide 8 ranks" in capsys.readouterr().err


class Sized(nn.Linear):
    """Does something else with a batch as large as its `size`; with any, if it has none."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__(64, 64)
        self.size = size

    def extra_repr(self) -> str:
        return f"size={self.size}"

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(len(x) if self.size is None else len(x) == self.size):
            x = super().forward(x).relu()
        return super().forward(x)


SIZED = ["--input", "float32[B,64]", "--world-size", "4", "--stage", "3"]


def test_batches_with_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """Two programs of other nodes tell nothing of the batches beyond them."""
    assert main(["plan", "tests.cli.test_plan:Sized", *SIZED]) == 1
    assert "batches of other sizes have other programs" in capsys.readouterr().err


def test_one_batch_with_another_program(capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for size in (2, 1024):
        assert main(["plan", f"tests.cli.test_plan:Sized(size={size})", *SIZED, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out)["stages"]["3"])
    for figure in ("peak_bytes", "activations_per_batch", "sent_bytes", "step_seconds"):
        assert plans[0][figure] == pytest.approx(plans[1][figure]), figure


class Raises(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("sentences of 9 words at most")


def test_what_a_model_itself_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    target = "tests.cli.test_plan:Raises(in_features=2, out_features=2)"
    assert main(["plan", target, *SIZED]) == 1
    said = capsys.readouterr().err
    assert "it raises ValueError" in said and "sentences of 9 words at most" in said
    assert "in forward: raise ValueError" in said and "--length" in said
