"""What a recipe asks for is what programs do and what training computes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import zerofx
from benchmarks.gpt import Gpt
from tests.hard.pair import full
from tests.integrations.examples import BASE, nested
from tests.integrations.record_deepspeed import RECORD, draw, net
from tests.ranks import run_ranks
from zerofx.errors import ConfigError
from zerofx.frontend.rehearsal import Rehearsal, rehearse_model
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.schedules import Schedule, WarmupLR
from zerofx.ir.facts import facts
from zerofx.ir.ops import KEEP, REDUCE_START, UNSHARD_START, waits_of
from zerofx.ir.program import Program


def _recipe(flat: dict[str, Any], **how: Any) -> Recipe:
    return zerofx.from_deepspeed(nested({**BASE, **flat}), **{"inner": "eager", **how})


@pytest.fixture(scope="module")
def rehearsal() -> Rehearsal:
    """A GPT of two layers, before any pass."""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    return rehearse_model(lambda: Gpt(depth=2), lambda: ((tokens,), {}), "eager")


def _programs(rehearsal: Rehearsal, stage: int, **zero: Any) -> tuple[Program, Program]:
    keys = {f"zero_optimization.{name}": value for name, value in zero.items()}
    recipe = _recipe({"zero_optimization.stage": stage, **keys}, world_size=2)
    return rehearsal.programs(recipe.config, 2)


def _most_elements(program: Program, op: Any) -> int:
    """Of any bucket with more than one member."""
    buckets = [start for start in program.calls(op) if len(facts(start).members) > 1]
    return max((program.full_bytes(start) // 4 for start in buckets), default=0)


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        (1, "allgather_bucket_size"),
        (2, "allgather_bucket_size"),
        (3, "stage3_prefetch_bucket_size"),
    ],
)
def test_gathers_have_the_size_of_buckets_in_elements(
    rehearsal: Rehearsal, stage: int, key: str
) -> None:
    counts = []
    for size in (0, 300_000, 10**9):
        forward, _ = _programs(rehearsal, stage, **{key: size})
        counts.append(len(forward.calls(UNSHARD_START)))
        assert _most_elements(forward, UNSHARD_START) <= 8 * size
    assert counts[0] > counts[1] > counts[2], counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reductions_have_the_size_of_buckets_in_elements(rehearsal: Rehearsal, stage: int) -> None:
    counts = [
        len(_programs(rehearsal, stage, reduce_bucket_size=size)[1].calls(REDUCE_START))
        for size in (0, 300_000, 10**9)
    ]
    assert counts[0] > counts[1] > counts[2], counts


def _overlaps(program: Program, op: Any) -> bool:
    """Whether anything is computed between a start and its first wait."""
    nodes = list(program.graph.nodes)
    return any(
        min(map(nodes.index, waits_of(start))) > nodes.index(start) + 1
        for start in program.calls(op)
    )


def test_communication_overlaps_unless_the_file_forbids_it(rehearsal: Rehearsal) -> None:
    for overlap in (True, False):
        _, backward = _programs(rehearsal, 3, overlap_comm=overlap)
        assert _overlaps(backward, UNSHARD_START) == overlap
        assert _overlaps(backward, REDUCE_START) == overlap


def test_persistent_parameters_are_not_gathered(rehearsal: Rehearsal) -> None:
    size = 256 * 256  # the largest that stays
    for threshold, stays in ((size, True), (size - 1, False)):
        forward, _ = _programs(
            rehearsal,
            3,
            stage3_param_persistence_threshold=threshold,
            stage3_prefetch_bucket_size=0,
        )
        specs = [spec for spec in forward.params.values() if spec.numel == size]
        assert specs and all(spec.layout.sharded != stays for spec in specs)


def test_live_and_reused_parameters_are_bounded(rehearsal: Rehearsal) -> None:
    def ahead(live: int) -> int:
        zero = {"stage3_max_live_parameters": live, "stage3_prefetch_bucket_size": 0}
        forward, _ = _programs(rehearsal, 3, **zero)
        return sum(map(list(forward.graph.nodes).index, forward.calls(UNSHARD_START)))

    def kept(reuse: int) -> int:
        zero = {"stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": 0}
        return len(_programs(rehearsal, 3, **zero)[0].calls(KEEP))

    assert ahead(10**9) < ahead(0), "gathers start earlier with more room"
    assert kept(0) == 0 < kept(500_000) < kept(10**9)


_TRAINING = {
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.05,
    "optimizer.type": "AdamW",
    "optimizer.params.lr": 0.1,
    "scheduler.type": "WarmupLR",
    "scheduler.params.warmup_num_steps": 3,
    "scheduler.params.warmup_min_lr": 0.01,
}


def _by_hand() -> list[Tensor]:
    """The same training in one process, with nothing of zerofx but the schedule."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    scheduler = Schedule(optimizer, WarmupLR(0.01, None, 3))
    for step in range(4):
        for rank, micro in itertools.product(range(2), range(2)):
            (model(draw(rank, step, micro)) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [param.detach() for param in model.parameters()]


def _train(stage: int, flat: dict[str, Any]) -> dict[str, Any]:
    model = net()
    recipe = _recipe({**_TRAINING, "zero_optimization.stage": stage, **flat}, min_shard_numel=8)
    optimizer = recipe.make_optimizer(model.parameters())
    scheduler, scaler = recipe.make_scheduler(optimizer), recipe.make_scaler("cpu")
    lines: list[str] = []
    report = recipe.make_report(optimizer, scaler, lines.append)
    zerofx.shard(model, recipe.config)
    run: Any = torch.compile(model, backend=recipe.backend, options=recipe.options)
    rates, taken = [], []
    for step in range(4):
        for micro in range(2):
            x = draw(dist.get_rank(), step, micro)
            if recipe.scaling.dynamic and (step, micro, dist.get_rank()) == (2, 0, 1):
                x *= 6e4
            with report.measure("forward"), recipe.autocast("cpu"):
                loss = run(x)
            recipe.backward(loss, scaler)
        rates.append(optimizer.param_groups[0]["lr"])
        taken.append(recipe.step(optimizer, scaler, scheduler))
        report.step()
    return {
        "params": [full(param) for param in model.parameters()],
        "rates": rates,
        "taken": taken,
        "lines": lines,
        "scale": scaler.get_scale(),
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_training_is_what_a_loop_by_hand_computes(stage: int) -> None:
    wanted = _by_hand()
    results = run_ranks(2, _train, stage, {"steps_per_print": 2})
    for result in results:
        assert result["taken"] == [True] * 4
        for ours, theirs in zip(result["params"], wanted, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    lines, silent = (result["lines"] for result in results)
    assert len(lines) == 2 and not silent, "rank 0 alone speaks"
    assert lines[1].startswith("step=4, skipped=0, lr=[")


def _as_recorded(config: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    model = net()
    recipe = zerofx.from_deepspeed(config, inner="eager", min_shard_numel=0)
    zerofx.shard(model, recipe.config)
    run: Any = torch.compile(model, backend=recipe.backend, options=recipe.options)
    optimizer = recipe.make_optimizer(model.parameters())
    scheduler, scaler = recipe.make_scheduler(optimizer), recipe.make_scaler("cpu")
    losses = []
    for step in range(5):
        for micro in range(recipe.batch.accumulation):
            loss = run(10 * draw(0, step, micro))
            recipe.backward(loss, scaler)
            losses.append(loss.item())
        recipe.step(optimizer, scaler, scheduler)
    return losses, [full(param).flatten() for param in model.parameters()]


@pytest.mark.parametrize("number", range(2))
def test_training_is_what_deepspeed_computed(number: int) -> None:
    recorded = json.loads(RECORD.read_text())["trainings"][number]
    ((losses, params),) = run_ranks(1, _as_recorded, recorded["config"])
    assert losses == pytest.approx(recorded["losses"], rel=1e-4)
    for ours, theirs in zip(params, recorded["params"], strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-4, atol=1e-5)


def test_an_overflow_skips_the_step_and_its_rate() -> None:
    keys = {
        "fp16.enabled": True,
        "fp16.initial_scale_power": 6,
        "fp16.hysteresis": 1,
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
    }
    for rank, result in enumerate(run_ranks(2, _train, 3, keys)):
        assert result["taken"] == [True, True, False, True]
        assert result["rates"][2] == result["rates"][3] and result["scale"] == 2**5
        if rank == 0:
            assert result["lines"][0].startswith("key ")
            assert "skipped=1" in result["lines"][-1] and "forward=" in result["lines"][-1]
            assert "peak=" in result["lines"][-1]


def test_a_parameter_without_gradient_is_an_error_if_the_file_says_so() -> None:
    for allowed in (True, False):
        key = {"zero_optimization.ignore_unused_parameters": allowed, "optimizer.type": "SGD"}
        recipe = _recipe(key, world_size=1)
        used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizer, scaler = recipe.make_optimizer([used, unused]), recipe.make_scaler("cpu")
        used.sum().backward()
        if allowed:
            assert recipe.step(optimizer, scaler)
            continue
        with pytest.raises(ConfigError, match=r"ignore_unused_parameters: false\n  - of shape"):
            recipe.step(optimizer, scaler)


def _saves(folder: str, allowed: bool) -> str:
    model = net()
    gather = {"zero_optimization.stage3_gather_16bit_weights_on_model_save": allowed}
    recipe = _recipe({"zero_optimization.stage": 3, "bf16.enabled": True, **gather})
    zerofx.shard(model, recipe.config)
    try:
        recipe.save_model(model, folder)
    except ConfigError as error:
        return str(error)
    return ""


def test_weights_are_saved_in_16_bits_if_the_file_allows_it(tmp_path: Path) -> None:
    for message in run_ranks(2, _saves, str(tmp_path / "no"), False):
        assert "stage3_gather_16bit_weights_on_model_save" in message
    assert run_ranks(2, _saves, str(tmp_path / "saved"), True) == ["", ""]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    assert saved["one.weight"].shape == (9, 6)
    index = tmp_path / "saved" / "model.safetensors.index.json"
    if index.exists():
        size = json.loads(index.read_text())["metadata"]["total_size"]
        assert size == 2 * sum(value.numel() for value in saved.values())


@pytest.mark.parametrize(("op", "gradient"), [("mean", 1 / 2), ("SUM", 3 / 2)])
def test_gradients_are_averaged_or_summed(op: str, gradient: float) -> None:
    keys = {"gradient_allreduce_op": op, "gradient_accumulation_steps": 2}
    recipe, weight = _recipe(keys, world_size=3), nn.Parameter(torch.ones(()))
    recipe.backward(1 * weight, recipe.make_scaler("cpu"))
    assert weight.grad is not None and weight.grad.item() == gradient


@pytest.mark.parametrize("loco", [True, {"err_beta": 0.5}, {"reset": 1024}])
def test_feedback_has_the_settings_of_loco(loco: Any) -> None:
    keys = {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": loco}
    with pytest.raises(ConfigError, match=r"'err_beta': 0\.8, 'reset_T': 1024"):
        _recipe({f"zero_optimization.{name}": value for name, value in keys.items()})
