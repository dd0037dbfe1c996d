"""Real ranks: means are means, errors are those of the codes, bits are those of lockstep."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.device import DEVICE
from tests.hard.pair import full
from tests.program_builder import layout_of, specs_of
from tests.ranks import run_ranks
from zerofx.codegen.reference import Reference
from zerofx.config import ZeroConfig
from zerofx.cost.comm import Algorithm, Algorithms
from zerofx.frontend.quantize import kernels_of
from zerofx.ir.kernels import Pack, reduce_kernels, unshard_kernels
from zerofx.ir.parcels import Codec, Member, Parcels
from zerofx.passes.quantize import why_exact
from zerofx.runtime.handles import live_sessions
from zerofx.sharding.shard import session_of
from zerofx.sim.quantized import reduce_quantized, unshard_quantized

NODES = [(1, 4), (2, 2), (4, 1)]
"""Nodes, and ranks on each."""
SHAPES = ((37, 40), (16, 130), (3, 700))
"""Rows that four ranks do not share evenly; fewer rows than ranks; blocks with short ends."""


class Weights(nn.Module):
    """Returns its weights, and a loss whose gradients are given."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(7)
        self.weights = nn.ParameterList(torch.randn(*s, generator=drawn) for s in shapes)

    def forward(self, grads: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        values = [weight * 1 for weight in self.weights]
        return sum((v * g).sum() for v, g in zip(values, grads, strict=True)), values  # type: ignore[return-value]


def grads_of(rank: int, scale: float = 0.0) -> list[Tensor]:
    """Gaussian numbers; or one number, the rank's."""
    drawn = torch.Generator().manual_seed(100 + rank)
    if scale:
        return [torch.full(shape, scale * (rank + 1), device=DEVICE) for shape in SHAPES]
    return [torch.randn(*shape, generator=drawn).to(DEVICE) for shape in SHAPES]


def step(options: dict[str, Any], scale: float = 0.0, rank: int | None = None) -> dict[str, Any]:
    """One backward: full weights as computed with, gradients, and this rank's part of both.

    With `rank` the gradients of all ranks are that one's.
    """
    model = Weights().to(DEVICE)
    settings = {"inner": "eager", "quantize_exact": (), **options}
    run = torch.compile(model, backend="zero3", options=settings)
    loss, values = run(grads_of(dist.get_rank() if rank is None else rank, scale))
    loss.backward()
    session = session_of(model)
    assert session is not None
    return {
        "values": [value.detach() for value in values],
        "grads": [full(weight.grad) for weight in model.weights],
        "specs": [state.spec for state in session.states],
        "norm": float(torch.nn.utils.get_total_norm([w.grad for w in model.weights]).full_tensor()),
    }


@pytest.mark.parametrize(("nodes", "local"), NODES)
def test_mean_of_constants_is_exact(nodes: int, local: int) -> None:
    options = {"quantize_gradients": "int4x128", "ranks_per_node": local}
    for found in run_ranks(4, step, options, 3.0, timeout=120):
        for grad in found["grads"]:
            torch.testing.assert_close(grad, torch.full_like(grad, 7.5), rtol=1e-6, atol=0)
        numel = sum(grad.numel() for grad in found["grads"])
        assert found["norm"] == pytest.approx(7.5 * numel**0.5, rel=1e-5)


def _relative(found: list[Tensor], wanted: list[Tensor]) -> float:
    error = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True))
    return (error / sum(float(b.square().sum()) for b in wanted)) ** 0.5


ERRORS = [("int8", 1, 0.008, 0.008), ("int4", 2, 0.13, 0.16), ("int4x32", 4, 0.1, 0.1)]
"""Codec, nodes, and what to expect of gathers and of reductions."""


@pytest.mark.parametrize(("codec", "nodes", "gathered", "reduced"), ERRORS)
def test_errors_are_those_of_the_codes(
    codec: str, nodes: int, gathered: float, reduced: float
) -> None:
    check_errors(codec, nodes, gathered, reduced)


def check_errors(
    codec: str, nodes: int, gathered: float, reduced: float, backend: str = "gloo"
) -> None:
    """A band from two thirds of the expected relative error to four thirds."""
    options = {
        "quantize_weights": codec,
        "quantize_gradients": codec,
        "ranks_per_node": 4 // nodes,
    }
    results = run_ranks(4, step, options, timeout=120, backend=backend)
    wanted = [weight.detach() for weight in Weights().weights]
    given = [grads_of(rank) for rank in range(4)]
    means = [torch.stack(each).mean(0) for each in zip(*given, strict=True)]
    for found in results:
        assert 2 / 3 < _relative(found["values"], wanted) / gathered < 4 / 3
        assert 2 / 3 < _relative(found["grads"], means) / reduced < 4 / 3
        _same_as_lockstep(found, Codec.parse(codec), nodes, given)


def _same_as_lockstep(
    found: dict[str, Any], codec: Codec, nodes: int, given: list[list[Tensor]]
) -> None:
    specs = found["specs"]
    weights = [weight.detach() for weight in Weights().weights]
    shards = [_chunks(weights, specs, rank) for rank in range(4)]
    gathered = unshard_quantized(unshard_kernels(specs, codec), shards)[0]
    reduced = reduce_quantized(
        reduce_kernels(specs, codec, codec, nodes), [[g.reshape(-1) for g in one] for one in given]
    )
    for place, spec in enumerate(specs):
        value = gathered[place][: spec.numel].view(spec.shape)
        assert torch.equal(found["values"][place], value)
        chunks = torch.cat([one[place] for one in reduced])[: spec.numel]
        assert torch.equal(found["grads"][place], chunks.view(spec.shape))


def _chunks(values: list[Tensor], specs: list[Any], rank: int) -> list[Tensor]:
    out: list[Tensor] = []
    for value, spec in zip(values, specs, strict=True):
        part = value[slice(*spec.rows(rank))].reshape(-1)
        size = spec.padded_numel // spec.layout.num_shards
        out.append(nn.functional.pad(part, (0, size - part.numel())))
    return out


def _both_ways(options: dict[str, Any]) -> bool:
    """Gradients by messages, and by the collective that ranks with GPUs call; gloo has both."""
    model = Weights()
    run = torch.compile(model, backend="zero3", options={"inner": "eager", **options})
    grads: list[list[Tensor]] = []
    way: Algorithm
    for way in ("point_to_point", "native"):
        loss, _ = run(grads_of(dist.get_rank()))
        domain = live_sessions()[-1].sharded
        assert domain.shard_comm is not None
        algorithms = Algorithms(way, way)
        domain.shard_comm = dataclasses.replace(domain.shard_comm, algorithms=algorithms)
        loss.backward()
        grads.append([full(weight.grad) for weight in model.weights])
        model.zero_grad()
    return all(map(torch.equal, *grads))


@pytest.mark.parametrize("local", [2, 4])
def test_collectives_bring_what_messages_bring(local: int) -> None:
    options = {"quantize_gradients": "int8x64", "ranks_per_node": local}
    assert run_ranks(4, _both_ways, options, timeout=120) == [True] * 4


def test_kernels_run_op_by_op_with_the_eager_inner_compiler() -> None:
    near = torch.fx.Graph().placeholder("x")
    near.meta["val"] = torch.empty(0)
    spec = Pack(Parcels((Member("w", 64, 64, torch.float32),), Codec(), 1))
    for inner in ("inductor", "eager"):
        kernel = kernels_of(ZeroConfig(inner=inner))(spec, near)
        assert kernel == Reference(spec, inner == "inductor")


def test_replicas_round_each_by_its_own_numbers() -> None:
    options, grads = {"quantize_gradients": "int4x64.stochastic"}, grads_of(0)
    everyone, by_groups = (
        _relative(run_ranks(4, step, {**options, **how}, 0.0, 0, timeout=120)[0]["grads"], grads)
        for how in ({}, {"replicate": 2})
    )
    assert 0.06 < everyone < 0.09
    assert by_groups < 1.15 * everyone, "groups of ranks draw the same"


def test_codes_are_shorter_than_what_would_travel() -> None:
    layout = dataclasses.replace(layout_of(2), reduce_dtype=torch.bfloat16)
    spec = specs_of({"w": (10, 20)}, layout, dtype=torch.float32)["w"]
    codecs = [Codec.parse("int8")]
    assert why_exact(spec, codecs, ()) == ""
    assert why_exact(spec, codecs, (), reduces=True) == "100 numbers a rank"
