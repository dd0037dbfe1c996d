"""Every key of a `ds_config.json` has an effect, or is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from tests.integrations.examples import BASE, ENABLED, ENABLED_PACKED, HONOURED, TOGETHER, nested
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.schedules import WarmupDecayLR, WarmupLR
from zerofx.integrations.deepspeed.settings import KEYS
from zerofx.passes.changes import as_change
from zerofx.runtime.loss_scale import FixedScaler

CONFIGS = Path(__file__).parent / "configs"


def _translate(flat: dict[str, Any], **how: Any) -> Recipe:
    return zerofx.from_deepspeed(nested(flat), **{"world_size": 4, **how})


def _effect(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, rows=())


def _sizes(recipe: Recipe) -> dict[str, int]:
    changes: Any = map(as_change, recipe.config.passes)
    return {change.name: change.new.target_bytes for change in changes}


def test_a_file_of_stage_2_with_comments() -> None:
    auto = {
        "fp16.enabled": True,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }
    file = CONFIGS / "ds_config_zero2_offload.json"
    with pytest.raises(UnsupportedError, match=r"zero_optimization\.offload_optimizer"):
        zerofx.from_deepspeed(file, auto=auto)
    recipe = zerofx.from_deepspeed(
        file, auto=auto, leave_out=["zero_optimization.offload_optimizer"], world_size=4
    )
    config = recipe.config
    assert (config.stage, config.accumulate, config.param_dtype) == (2, 2, torch.float16)
    assert _sizes(recipe) == {"fuse_unshards": 400_000_000, "fuse_reduces": 400_000_000}
    assert recipe.batch.train == 4 * 2 * 4
    assert recipe.gradient_clipping == 1.0 and recipe.steps_per_print == 2000
    assert recipe.shape == WarmupLR(0, 3e-5, 500)
    optimizer = recipe.make_optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.8, 0.999)
    assert recipe.make_scaler("cpu").get_scale() == 2**16
    assert "left out" in str(recipe) and "always so" in str(recipe)
    assert "batch: 32 = 4 (micro-batch) × 2 (accumulation) × 4 (ranks)" in str(recipe)


def test_a_file_of_stage_3_full_of_autos() -> None:
    file = CONFIGS / "ds_config_zero3_pp.json"
    with pytest.raises(ConfigError) as asked:
        zerofx.from_deepspeed(file)
    needed = ["optimizer.params.lr", "scheduler.params.warmup_max_lr"]
    needed.append("scheduler.params.warmup_num_steps")
    assert list(asked.value.offenders) == needed
    auto = dict(zip(needed, (3e-4, 3e-4, 100), strict=True))
    recipe = zerofx.from_deepspeed(file, auto=auto, world_size=16, inner="eager")
    config = recipe.config
    assert (config.stage, config.accumulate, config.inner) == (3, 4, "eager")
    assert (config.prefetch_bytes, config.memory_budget) == (2_000_000_000, 1_000_000_000)
    assert config.min_shard_numel == zerofx.ZeroConfig().min_shard_numel
    assert (config.quantize_weights, config.quantize_gradients) == ("int8", "int4")
    assert (config.secondary_shards, config.ranks_per_node) == (True, 8)
    assert recipe.batch.train == 2 * 4 * 16
    assert recipe.shape == WarmupDecayLR(0.0, 3e-4, 100, total_num_steps=1000)
    assert recipe.gathers_on_save


def test_every_honoured_key_has_an_example() -> None:
    assert {*HONOURED, *TOGETHER} == {p for p, key in KEYS.items() if key.kind == "honoured"}


@pytest.mark.parametrize("path", HONOURED)
def test_an_honoured_key_has_an_effect(path: str) -> None:
    base, one, other = HONOURED[path]
    recipes = [_translate({**base, path: value}) for value in (one, other)]
    assert _effect(recipes[0]) != _effect(recipes[1])
    for recipe, value in zip(recipes, (one, other), strict=True):
        taken = next(row.taken for row in recipe.rows if row.key == path)
        idle = taken in ("always so", "off", "by default", "not at this stage")
        assert idle is (value is None)


@pytest.mark.parametrize("path", [key.path for key in KEYS.values() if key.kind == "always"])
def test_a_key_without_counterpart_changes_nothing_and_says_so(path: str) -> None:
    enabled = ENABLED_PACKED if ".dynamic_batching." in path else ENABLED
    value = {"text": "bf16", "count": 1}.get(KEYS[path].type, True)
    with_key = _translate({**enabled, path: value})
    assert _effect(with_key) == _effect(_translate(enabled))
    (row,) = (row for row in with_key.rows if row.key == path)
    assert row.taken == "always so" and row.meaning


@pytest.mark.parametrize(
    "path", [key.path for key in KEYS.values() if key.kind in ("missing", "refused")]
)
def test_what_is_not_here_is_refused_by_name_unless_it_is_off(path: str) -> None:
    key = KEYS[path]
    asking = False if True in key.off else {"enabled": True, "device": "cpu"}
    with pytest.raises(UnsupportedError) as refused:
        _translate({**BASE, path: asking})
    assert path in str(refused.value) and key.meaning in str(refused.value)
    for off in key.off or (False, None, {"enabled": False}, {"device": "none"}):
        assert _translate({**BASE, path: off}).rows[-1].taken == "off"
    left = _translate({**BASE, path: asking}, leave_out=[path])
    assert left.rows[-1].taken == "left out"


def test_keys_speak_only_where_they_mean_something() -> None:
    at_2 = _translate(
        {**BASE, "zero_optimization.stage": 2, "zero_optimization.stage3_max_live_parameters": 9}
    )
    assert at_2.rows[-1].taken == "not at this stage" and at_2.config.prefetch_bytes is None
    disabled = _translate({**BASE, "fp16.enabled": False, "fp16.loss_scale": 8})
    assert disabled.rows[-1].taken == "off" and not disabled.scaling.enabled


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_optimisation.stage", "did you mean zero_optimization.stage"),
        ("zero_optimization.reduce_bucketsize", "mean zero_optimization.reduce_bucket_size"),
        ("gradient_cliping", "did you mean gradient_clipping"),
        ("optimizer", "an object is expected here"),
    ],
)
def test_unknown_keys_are_errors(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _translate({**BASE, name: 1})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.reduce_bucket_size", 0.9),
        ("zero_optimization.reduce_bucket_size", "1e8"),
        ("zero_optimization.overlap_comm", "true"),
        ("zero_optimization.stage", True),
        ("zero_optimization.stage", 4),
        ("zero_optimization.mics_shard_size", 3),
        ("gradient_clipping", -1),
        ("gradient_accumulation_steps", 0),
        ("optimizer.params.betas", [0.9]),
        ("communication_data_type", "fp8"),
        ("scheduler.type", "CosineLR"),
        ("gradient_allreduce_op", "max"),
    ],
)
def test_values_of_a_wrong_type_are_errors(path: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=path.rpartition(".")[2]):
        _translate({**BASE, path: value})


@pytest.mark.parametrize(
    ("train", "micro", "steps", "wanted"),
    [
        (32, 4, 2, (32, 4, 2)),
        (32, 4, None, (32, 4, 2)),
        (32, None, 2, (32, 4, 2)),
        (None, 4, 2, (32, 4, 2)),
        (32, None, None, (32, 8, 1)),
        (None, 8, None, (32, 8, 1)),
        (30, 4, 2, None),
        (30, None, None, None),
        (None, None, 2, None),
    ],
)
def test_batch_sizes_multiply(
    train: int | None, micro: int | None, steps: int | None, wanted: tuple[int, ...] | None
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = dict(zip(names, (x or "auto" for x in (train, micro, steps)), strict=True))
    if wanted is None:
        with pytest.raises(ConfigError, match="train_batch_size"):
            _translate(sizes)
    else:
        batch = _translate(sizes).batch
        assert (batch.train, batch.micro, batch.accumulation) == wanted


def test_a_section_under_two_names_is_an_error() -> None:
    on, off = {"enabled": True}, {"enabled": False}
    with pytest.raises(ConfigError, match="bfloat16, which is an older name"):
        zerofx.from_deepspeed({**BASE, "bf16": on, "bfloat16": off})
    older = {**BASE, "bfloat16": {"enabled": "auto"}}
    assert zerofx.from_deepspeed(older, auto={"bfloat16.enabled": True}).scaling.enabled
    for leave_out in (["bf16"], ["bfloat16.enabled"], "bfloat16"):
        left = zerofx.from_deepspeed(older, leave_out=leave_out)
        assert [row.taken for row in left.rows if row.key == "bf16.enabled"] == ["left out"]


def test_auto_must_agree_with_the_file() -> None:
    assert _translate(BASE, auto=BASE).batch.micro == 2
    with pytest.raises(ConfigError, match="2 in the file, 3 in auto"):
        _translate(BASE, auto={"train_micro_batch_size_per_gpu": 3})
    assert not _translate(BASE, auto={"fp16.enabled": True}).scaling.enabled, "not in the file"
    with pytest.raises(ConfigError, match="auto names keys"):
        _translate(BASE, auto={"fp16.enable": True})
    with pytest.raises(ConfigError, match="sets options accumulate"):
        _translate(BASE, accumulate=3)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"total_num_steps": 9, "cycle_min_lr": 1}, "cycle_min_lr: not of WarmupDecayLR"),
        ({}, "total_num_steps: absent"),
        ({"total_num_steps": 9, "warmup_num_steps": 0}, "warmup_num_steps is 0"),
        ({"total_num_steps": 9, "warmup_type": "cosine"}, "warmup_type is 'cosine'"),
    ],
)
def test_schedules_that_do_not_fit(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zerofx.from_deepspeed({**BASE, "scheduler": {"type": "WarmupDecayLR", "params": params}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n // "b"\n /* two\n lines */ "c" }', "line 4"),
        ('{"a": 1, "a": 2}', "named twice in one object: a"),
        ("[1]", "holds no object"),
        ('{"a": "é"}', "cannot read .*: 'utf-8' codec"),
    ],
)
def test_files_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        zerofx.from_deepspeed(file)
    with pytest.raises(ConfigError, match="cannot read"):
        zerofx.from_deepspeed(tmp_path / "none.json")


def test_comments_and_commas(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(
        '{ # one\n "train_batch_size": 4, // two\n'
        ' "wandb": {"team": "a//b, }", "enabled": false,},\n}'
    )
    recipe = zerofx.from_deepspeed(file, world_size=2)
    assert recipe.batch.micro == 2 and recipe.rows[1].given == "a//b, }"


@pytest.mark.parametrize(
    ("flat", "kind", "scale", "enabled"),
    [
        ({}, FixedScaler, 1.0, False),
        ({"bf16.enabled": True}, FixedScaler, 1.0, True),
        ({"bf16.enabled": True, "bf16.check_grad_overflow": False}, FixedScaler, 1.0, False),
        ({"fp16.enabled": True, "fp16.loss_scale": 128}, FixedScaler, 128.0, True),
        ({"fp16.enabled": True, "fp16.initial_scale_power": 4}, zerofx.GradScaler, 16.0, True),
        (
            {"torch_autocast.enabled": True, "torch_autocast.dtype": "torch.float16"},
            zerofx.GradScaler,
            2.0**16,
            True,
        ),
    ],
)
def test_scalers(flat: dict[str, Any], kind: type, scale: float, enabled: bool) -> None:
    scaler = _translate({**BASE, **flat}).make_scaler("cpu")
    assert (type(scaler), scaler.get_scale(), scaler.is_enabled()) == (kind, scale, enabled)


def test_autocast_is_what_the_file_says() -> None:
    x = torch.ones(2, 2)
    for flat, dtype in (({}, torch.float32), ({"torch_autocast.enabled": True}, torch.bfloat16)):
        with _translate({**BASE, **flat}).autocast("cpu"):
            assert (x @ x).dtype == dtype


def test_passes_of_ones_own_go_along() -> None:
    passes = (zerofx.without("schedule"),)
    sizes = {"zero_optimization.stage": 2, "zero_optimization.reduce_bucket_size": 8}
    recipe = _translate({**BASE, **sizes}, passes=passes)
    assert [as_change(each).name for each in recipe.config.passes] == ["fuse_reduces", "schedule"]


@pytest.mark.parametrize("section", ["moe", "amp", "elasticity", "autotuning", "eigenvalue"])
def test_enabled_sections_are_refused(section: str) -> None:
    with pytest.raises(UnsupportedError, match=section):
        zerofx.from_deepspeed({**BASE, section: {"enabled": True, "more": 1}}, world_size=1)
    zerofx.from_deepspeed({**BASE, section: {"enabled": False, "more": 1}}, world_size=1)
