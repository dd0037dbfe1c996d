"""The rule about what travels as codes, and where codes are refused."""

from __future__ import annotations

import dataclasses

import pytest

from tests.hand_program import Hand
from tests.ir.test_verify import refused
from tests.program_builder import layout_of, specs_of
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError
from zerofx.ir import ops
from zerofx.ir.facts import Role, facts, set_facts
from zerofx.ir.program import Program
from zerofx.passes.pipelines import pipeline

LARGE = specs_of({"w": (30, 30)}, layout_of(2))
RESIDENT = specs_of({"w": (30, 30)}, layout_of(2, resident=True))


def _gather(resident: bool = False, **stated: int) -> Program:
    hand = Hand(RESIDENT if resident else LARGE, stage=2 if resident else 3)
    shard = hand.shard("w")
    args = ([shard], hand.params["w"].layout.handle, "int8x64")
    start = hand.call(ops.UNSHARD_START, *args, role=Role.UNSHARD, param="w")
    set_facts(start, dataclasses.replace(facts(start), members=("w",), **stated))  # type: ignore[arg-type]
    return hand.program([hand.wait(start)])


def test_codes_state_their_bytes() -> None:
    wanted = ("unshard.w states 5 B with 0 B of scales", "sends 544 B with 32 B")
    refused(_gather(wire_bytes=5), "codes_as_stated", *wanted)


def test_resident_copies_are_not_gathered_as_codes() -> None:
    # Codes of all ranks would overwrite the shard itself, which the copy holds.
    refused(_gather(resident=True), "codes_as_stated", "unshard.w cannot send int8x64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2, "quantize_weights": "int8"}, 'quantize_weights.*stage 2.*backend="zero3"'),
        ({"stage": 0, "quantize_gradients": "int8"}, 'quantize_gradients.*stage 0.*"zero1"'),
        ({"quantize_weights": "int8.stochastic"}, "forward and backward"),
        ({"quantize_weights": "int3"}, "quantize_weights.*int3.*did you mean 'int8'"),
        ({"quantize_weights": "int8x50"}, "blocks of 50 .*such as 64"),
        ({"quantize_weights": "int8-64"}, "is no codec.*did you mean 'int8x64'"),
        ({"quantize_gradients": ("int8", "fp4")}, "quantize_gradients.*'fp4'.*mean 'fp8'"),
        ({"quantize_gradients": "int8.stochstic"}, "mean 'int8.stochastic'"),
        ({"quantize_weights": 8}, "quantize_weights=8"),
        ({"quantize_gradients": ("int8", "int4", "int4")}, "quantize_gradients"),
        ({"quantize_gradients": ("int8x64", "int4x32")}, "blocks of 64 and of 32"),
        ({"quantize_gradients": 4}, "quantize_gradients=4"),
        ({"quantize_exact": (3,)}, "quantize_exact"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        pipeline(ZeroConfig(**options))  # type: ignore[arg-type]


def test_one_pattern_need_not_be_a_list() -> None:
    assert ZeroConfig(quantize_exact="*head*").quantize_exact == ("*head*",)  # type: ignore[arg-type]
    assert ZeroConfig(quantize_gradients=["int8", "int4"]).gradient_codecs == ("int8", "int4")  # type: ignore[arg-type]
