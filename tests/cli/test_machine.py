"""Which machine the options name, beside one that was measured."""

from __future__ import annotations

import argparse

import pytest

from zerofx.cli.arguments import add_machine
from zerofx.cli.machine import machine_of
from zerofx.cost.compute import Roofline
from zerofx.cost.link import Link
from zerofx.cost.machine import Machine

MEASURED = Machine("cpu", Roofline(1e9, 2e9), Link(1e8, 1e-3), Link(5e7, 2e-3), measured=True)


def chosen(*options: str) -> Machine:
    parser = argparse.ArgumentParser()
    add_machine(parser)
    return machine_of(parser.parse_args(options), MEASURED)


def test_what_was_measured_stays() -> None:
    assert chosen() == MEASURED
    faster = chosen("--flops", "3G")
    assert faster.roofline == Roofline(3e9, 2e9)
    assert faster.reductions == MEASURED.reductions and faster.measured


def test_a_link_that_was_said_serves_both_directions() -> None:
    said = chosen("--link", "1GB/s")
    assert said.link == Link(1e9, 1e-3) and said.reductions is None and not said.measured
    assert chosen("--latency", "0").link == Link(1e8, 0.0)


@pytest.mark.parametrize(
    "option", ["--link=0", "--flops=0", "--bandwidth=0", "--latency=-1", "--latency=nan"]
)
def test_no_machine_is_that_slow(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        chosen(option)
    assert left.value.code == 2
    name, _, value = option.partition("=")
    said = capsys.readouterr().err
    assert f"argument {name}: {value!r} is" in said
