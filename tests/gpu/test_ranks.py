"""Ranks that share a CUDA device, over gloo and over NCCL: what holds on CPUs holds there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.checkpoint.test_resume import pairs
from tests.gpu.backends import BACKENDS, NEEDS_CUDA
from tests.hard.pair import EAGER, full
from tests.hard.test_hybrid import hybrid
from tests.hard.test_secondary import SCENARIOS, STRICT, differences
from tests.models import batch, make
from tests.numerics.cover import Row, pairwise
from tests.numerics.runs import CLIP, MODELS, STAGES, zero_and_reference
from tests.numerics.test_loss_scaling import one_process, sharded
from tests.oracle import assert_same, train
from tests.quantized.test_training import learnt, variety
from tests.quantized.test_values import ERRORS, check_errors
from tests.ranks import run_ranks

pytestmark = [*NEEDS_CUDA, pytest.mark.parametrize("backend", BACKENDS)]

ROWS = pairwise(
    {
        "name": MODELS,
        "stage": STAGES,
        "ranks": (2, 4),
        "inner": ("eager", "inductor"),
        "setting": (("sgd", CLIP), ("adamw", None)),
    }
)


def described(row: Row) -> str:
    return "{name}-{stage}-{ranks}-{inner}".format(**row)


@pytest.mark.parametrize("row", ROWS, ids=described)
def test_training(backend: str, row: Row) -> None:
    # Of fp64 and attention, torch 2.11's Inductor makes code that fails.
    dtype = torch.float64 if row["inner"] == "eager" else torch.float32
    job = (zero_and_reference, row["name"], row["stage"], row["setting"], "ddp", dtype)
    options = {"inner": row["inner"]}
    found = run_ranks(row["ranks"], *job, timeout=240, backend=backend, **options)
    got, want = zip(*found, strict=True)
    assert_same(got, want, rtol=1e-8 if dtype is torch.float64 else 2e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_mixed_precision(backend: str, stage: int) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    where = {"backend": backend, "timeout": 240}
    want = run_ranks(2, train, "gpt", "fully_shard", precision=precision, **where)
    options = {"inner": "eager"}
    job = (train, "gpt", f"zero{stage}")
    got = run_ranks(2, *job, precision=precision, options=options, **where)
    assert_same(got, want, rtol=1e-2)


@pytest.mark.parametrize("autocast", [False, True])
def test_loss_scaling(backend: str, autocast: bool) -> None:
    wanted = one_process(0.1, autocast)
    found = run_ranks(2, sharded, 3, 0.1, autocast, timeout=240, backend=backend)
    for scales, params in found:
        assert scales == wanted[0]
        for got, want in zip(params, wanted[1], strict=True):
            # One process computes on the CPU, whose fp16 rounds otherwise.
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid(backend: str, stage: int) -> None:
    run_ranks(4, hybrid, stage, "replicate", timeout=240, backend=backend)


def test_secondary_shards(backend: str) -> None:
    job = (differences, STRICT, SCENARIOS)
    assert run_ranks(4, *job, timeout=240, backend=backend) == [[]] * 4


@pytest.mark.parametrize(("codec", "nodes", "gathered", "reduced"), ERRORS)
def test_codes(backend: str, codec: str, nodes: int, gathered: float, reduced: float) -> None:
    """Kernels that CUDA runs write, and read, the bits of the reference."""
    check_errors(codec, nodes, gathered, reduced, backend)


def test_codes_go_together_with_all_else(backend: str) -> None:
    run_ranks(2, variety, timeout=240, backend=backend)


def test_codes_learn(backend: str) -> None:
    before, exact, quantized = run_ranks(4, learnt, 60, timeout=240, backend=backend)[0]
    assert exact < before - 1
    assert quantized != exact and abs(quantized / exact - 1) < 0.01


def test_checkpoints(backend: str, tmp_path: Path) -> None:
    run_ranks(2, pairs, tmp_path, timeout=240, backend=backend)


def exported(folder: Path) -> None:
    model, rank = make("gpt"), dist.get_rank()
    run = torch.compile(model, backend="zero3", options=EAGER)
    run(*batch("gpt", rank, 0)).backward()
    zerofx.checkpoint.export_safetensors(model, folder)
    again = make("gpt", seed=1)
    zerofx.load_safetensors(again, folder, zerofx.ZeroConfig(**EAGER))
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(full(ours), full(theirs))


def test_exports(backend: str, tmp_path: Path) -> None:
    run_ranks(2, exported, tmp_path, timeout=240, backend=backend)


def muon(sharded: bool) -> list[torch.Tensor]:
    model, rank = make("mlp"), dist.get_rank()
    matrices = [param for param in model.parameters() if param.ndim == 2]
    if sharded:
        run = torch.compile(model, backend="zero3", options=EAGER)
        optimizer = zerofx.OwnerOptimizer(matrices, torch.optim.Muon, lr=0.02)
    else:
        run = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Muon(matrices, lr=0.02)
    for step in range(3):
        run(*batch("mlp", rank, step)).backward()
        optimizer.step()
        model.zero_grad()
    return [full(param) for param in model.parameters()]


def test_owners(backend: str) -> None:
    where = {"backend": backend, "timeout": 240}
    pairs = zip(run_ranks(2, muon, True, **where), run_ranks(2, muon, False, **where), strict=True)
    for got, want in pairs:
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


def computed_buffers() -> None:
    with zerofx.meta_init():
        model = nn.BatchNorm1d(4)
        model.register_buffer("angles", torch.arange(4.0))
    zerofx.shard(model, zerofx.ZeroConfig(stage=3))
    assert {buffer.device.type for buffer in model.buffers()} == {"cuda"}


def test_computed_buffers_of_meta_init(backend: str) -> None:
    run_ranks(2, computed_buffers, timeout=240, backend=backend)


def generators() -> None:
    with zerofx.meta_init():
        model = nn.Module()
        here, there = torch.Generator(), torch.Generator("cuda")
        model.here = nn.Parameter(torch.rand(9, 4, generator=here.manual_seed(5)))
        model.there = nn.Parameter(torch.empty(9, 4).normal_(generator=there.manual_seed(6)))
        torch.manual_seed(7)
        model.own = nn.Parameter(torch.rand(9, 4))
        nn.init.trunc_normal_(model.here, generator=here)
    zerofx.shard(model, zerofx.ZeroConfig(stage=3, min_shard_numel=0))
    drawn = torch.rand(9, 4, generator=here.manual_seed(5))
    assert torch.equal(full(model.here).cpu(), nn.init.trunc_normal_(drawn, generator=here))
    there.manual_seed(6)
    drawn = torch.empty(9, 4, device="cuda").normal_(generator=there)
    assert torch.equal(full(model.there), drawn)
    torch.manual_seed(7)
    assert torch.equal(full(model.own), torch.rand(9, 4, device="cuda"))


def test_meta_init_draws_where_a_generator_is(backend: str) -> None:
    run_ranks(2, generators, timeout=240, backend=backend)
