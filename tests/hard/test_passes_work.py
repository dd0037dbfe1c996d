"""The passes do the work: no marker communicates, and no mandatory pass can be spared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.hard.markers import markers_raise
from tests.hard.pair import EAGER, INDUCTOR, Pair, full, same
from tests.hard.wire import watched
from tests.models import batch, make
from tests.ranks import run_ranks
from zerofx.config import ZeroConfig
from zerofx.passes.pipelines import pipeline
from zerofx.runtime.handles import live_domains


def _zoo_loss(name: str) -> Callable[[Any, int], Tensor]:
    return lambda run, number: run(*batch(name, dist.get_rank(), number))


def _without_markers(name: str, stage: int) -> None:
    run: Any = torch.compile(make(name), backend=f"zero{stage}", options=EAGER)
    with markers_raise(), torch.no_grad():
        got = _zoo_loss(name)(run, 0)
        same(got, _zoo_loss(name)(make(name), 0), "loss", 1e-6)


@pytest.mark.parametrize(
    ("stage", "name"), [(0, "moe"), (1, "gpt_checkpointed"), (2, "moe"), (3, "encoder_decoder")]
)
def test_every_collective_is_a_node(stage: int, name: str) -> None:
    """In evaluation; `tests.numerics.runs` trains every model and stage while markers raise."""
    run_ranks(2, _without_markers, name, stage)


def _without_markers_through_inductor() -> None:
    pair = Pair(make("mlp"), 3, INDUCTOR, rtol=1e-5)
    with markers_raise():
        pair.train(_zoo_loss("mlp"), 3)
        with torch.no_grad():
            _zoo_loss("mlp")(pair.run, 0)


def test_every_collective_is_a_node_through_inductor() -> None:
    run_ranks(2, _without_markers_through_inductor, timeout=220)


def test_the_markers_would_raise() -> None:
    run_ranks(2, _markers_raise)


def _markers_raise() -> None:
    pair = Pair(make("mlp"), 3)
    pair.train(_zoo_loss("mlp"), 1)
    with markers_raise(), pytest.raises(AssertionError, match="a marker communicates"):
        _zoo_loss("mlp")(pair.model, 0)


class Everything(nn.Module):
    """One model in which every mandatory pass has something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(7, 7), nn.Linear(7, 7)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.norm(self.once(x)).sin().mean(), self.twice.weight, self.once.bias


def _train(stage: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps; the weights that forwards returned are looked at afterwards."""
    torch.manual_seed(0)
    model = Everything()
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Any] = {}
    for number in range(2):
        loss, weight, bias = run(*batch("mlp", dist.get_rank(), number)[:1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen |= {f"weight {number}": weight.detach(), f"bias {number}": bias.detach()}
    model.eval()
    with torch.no_grad():
        # Statistics follow rank 0's data, so that ranks agree on an equal input.
        seen["evaluation"] = run(*batch("mlp", 0, 9)[:1])[0]
    seen |= {name: full(param) for name, param in model.named_parameters()}
    return {name: value.tolist() for name, value in seen.items()}


# One bucket; weights are sharded, and what has fewer elements is replicated.
_PACKED = EAGER | {"bucket_bytes": 1 << 20, "min_shard_numel": 20}


def _outcome(stage: int, options: dict[str, Any]) -> tuple[Any, int, int]:
    """Numbers or the error, calls on the wire, and bytes of full values that were never freed."""
    try:
        with watched() as wire:
            result = _train(stage, options)
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0, 0
    kept = live_domains()[-1].session.gathered.used_bytes()
    return result, wire.count(), kept


def _outcomes(stage: int, verify: bool) -> dict[str, tuple[Any, int, int]]:
    """What happens with all passes (under ""), and without each mandatory one."""
    out = {"": _outcome(stage, _PACKED)}
    names = [each.name for each in pipeline(ZeroConfig(stage=stage)) if each.mandatory]
    for name in names:
        torch._dynamo.reset()
        out[name] = _outcome(stage, {**_PACKED, "disable": (name,), "verify": verify})
    return out


# Not needed for the result there: a replicated value costs nothing to read again.
_ECONOMIES = {0: {"merge_unshards"}, 3: set[str]()}


@pytest.mark.parametrize("stage", [0, 3])
def test_no_mandatory_pass_can_be_spared(stage: int) -> None:
    by_rank = run_ranks(2, _outcomes, stage, False)
    want, calls, kept = by_rank[0][""]
    assert isinstance(want, dict), want
    for name in by_rank[0].keys() - {""} - _ECONOMIES[stage]:
        # An error, other numbers, or what the papers forbid: more on the wire, more kept.
        assert any(
            got[name][0] != want or got[name][1] > calls or got[name][2] > kept for got in by_rank
        ), f"stage {stage} does without {name}"


def test_the_verifier_notices_a_disabled_pass() -> None:
    for outcomes in run_ranks(2, _outcomes, 3, True):
        for name in outcomes.keys() - {""}:
            result = outcomes[name][0]
            assert isinstance(result, str) and "VerificationError" in result, (name, result)
