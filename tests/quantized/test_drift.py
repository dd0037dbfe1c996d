"""The drift monitor: silent about Gaussian numbers, and loud about outliers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.codegen.strategies import ALL_CODECS
from tests.codegen.test_reference import error, gaussian, round_trip
from tests.logs import heard
from tests.quantized.test_values import Weights, grads_of
from tests.ranks import run_ranks
from zerofx.errors import ConfigError
from zerofx.frontend.layouts import warn_of_idle_patterns
from zerofx.ir.error_bands import expected_error
from zerofx.option_checks import at_stage

OPTIONS = {
    "inner": "eager",
    "quantize_exact": (),
    "quantize_weights": "int8x64",
    "quantize_gradients": ("int4x64", "int8x64"),
    "ranks_per_node": 2,
    "drift_every": 2,
    "bucket_bytes": 1 << 20,
}


@pytest.mark.parametrize("codec", ALL_CODECS, ids=lambda codec: codec.name)
def test_what_is_expected_is_the_error_on_gaussian_numbers(codec: Any) -> None:
    x = gaussian(1 << 18)
    assert expected_error(codec) == pytest.approx(error(round_trip(x, codec), x), rel=0.06)


def _watched() -> dict[str, Any]:
    model = Weights()
    run = torch.compile(model, backend="zero3", options=OPTIONS)

    def step(outliers: bool) -> None:
        grads = grads_of(dist.get_rank())
        if outliers:
            grads[1].view(-1)[::32] = 1e4
        run(grads)[0].backward()

    with heard("zerofx.runtime.drift") as warned:
        step(False)
        calm = zerofx.drift(model)
        assert not warned
        with torch.no_grad():
            model.weights[0].to_local().view(-1)[::32] = 1e4  # type: ignore[union-attr]
        step(True)
        assert not warned and zerofx.drift(model) == calm, "every second time"
        step(True)
    return {"calm": calm, "after": zerofx.drift(model), "warned": warned}


def test_outliers_are_found_and_gaussian_numbers_are_not() -> None:
    names = ["weights.0", "weights.1", "weights.2"]
    for found in run_ranks(4, _watched, timeout=120):
        unshard, inside, across = found["calm"]
        assert [each.codec for each in found["calm"]] == ["int8x64", "int4x64", "int8x64"]
        assert across.name == f"{inside.name}, between nodes" and unshard.name[:8] == "unshard "
        for drift in found["calm"]:
            assert sorted(drift.params) == names and not drift.suspects()
            assert 2 / 3 < drift.error / drift.expected < 4 / 3
        unshard, inside, across = found["after"]
        assert unshard.suspects() == ["weights.0"]
        assert inside.suspects() == ["weights.1"]
        assert not across.suspects(), "what came had lost its small numbers already"
        assert inside.params["weights.1"][1] > 0.9 > 0.3 > inside.params["weights.0"][1]
        assert len(found["warned"]) == 2
        assert "int8x64 does not suit weights.0:" in found["warned"][0]
        assert unshard.name in found["warned"][0]


def _large() -> tuple[list[float], list[str]]:
    model = Weights()
    options = {**OPTIONS, "quantize_exact": ("wieghts.*", "*embed*")}
    run = torch.compile(model, backend="zero3", options=options)
    with heard("zerofx.frontend.layouts") as said:
        run([1e20 * grad for grad in grads_of(dist.get_rank())])[0].backward()
    return [each.error / each.expected for each in zerofx.drift(model)], said


def test_squares_of_large_numbers_do_not_overflow() -> None:
    for rank, (found, said) in enumerate(run_ranks(4, _large, timeout=120)):
        assert len(found) == 3 and all(2 / 3 < error < 4 / 3 for error in found)
        assert len(said) == (rank == 0) and all("'wieghts.*'" in each for each in said)


def test_patterns_that_fit_nothing_are_named() -> None:
    """But for those by default, and those that fit a name, or a class, of any case."""
    patterns = ("*Embed*", "*_emb*", "*norm*", "WEIGHTS.1", "parameterlist", "weights", "Head")
    with heard("zerofx.frontend.layouts") as said:
        for codes in ({}, {"quantize_weights": "int8"}):
            warn_of_idle_patterns(Weights(), zerofx.ZeroConfig(quantize_exact=patterns, **codes))
    assert [each.split("'")[1] for each in said] == ["*Embed*", "weights", "Head"]


@pytest.mark.parametrize("stage", range(4))
def test_other_stages_go_without(stage: int) -> None:
    """As in plans of them: they do not code weights."""
    config = zerofx.ZeroConfig(stage=3, quantize_weights="int8", drift_every=2)
    other = at_stage(config, stage)
    assert other.stage == stage and (other.drift_every is None) == (stage < 3)


def test_there_must_be_codes_to_compare() -> None:
    with pytest.raises(ConfigError, match="drift_every"):
        zerofx.ZeroConfig(drift_every=5)
