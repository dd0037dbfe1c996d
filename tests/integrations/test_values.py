"""Values in a `ds_config.json` that cannot hold are named; those of a trainer fill what is open."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from tests.integrations.examples import BASE, nested
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations import auto_values
from zerofx.integrations.deepspeed.recipe import Recipe


def _recipe(flat: dict[str, Any], **auto: Any) -> Recipe:
    return zerofx.from_deepspeed(nested({**BASE, **flat}), world_size=1, **auto)


_ADAM = {"optimizer.type": "AdamW"}
_SGD = {"optimizer.type": "SGD"}
_CYCLE = {"scheduler.type": "OneCycle", "scheduler.params.cycle_max_lr": 0.1}
_WARMUP = {"scheduler.type": "WarmupLR"}

_WRONG: list[tuple[str, Any, dict[str, Any]]] = [
    ("optimizer.params.betas", [0.9, 2], _ADAM),
    ("optimizer.params.betas", ["a", 0.9], _ADAM),
    ("optimizer.params.eps", "1e-8", _ADAM),
    ("optimizer.params.weight_decay", math.nan, _ADAM),
    ("optimizer.params.foreach", True, {**_ADAM, "optimizer.params.fused": True}),
    ("optimizer.params.nesterov", True, _SGD),
    ("scheduler.params.cycle_min_lr", "x", _CYCLE),
    ("scheduler.params.cycle_min_lr", [0.1, "x"], _CYCLE),
    ("scheduler.params.cycle_momentum", 1, {**_CYCLE, "scheduler.params.cycle_min_lr": 0.1}),
    ("scheduler.params.warmup_num_steps", math.inf, _WARMUP),
    ("scheduler.params.warmup_num_steps", 0.1, _WARMUP),  # a share of the run, to transformers
    ("scheduler.params.cycle_second_step_size", -1, {**_CYCLE, "scheduler.params.cycle_min_lr": 0}),
    ("fp16.loss_scale_window", 0, {"fp16.enabled": True}),
    ("scheduler.params.last_batch_iteration", 0.5, _WARMUP),
    ("steps_per_print", 1.5, {}),
    ("zero_optimization.reduce_bucket_size", math.inf, {}),
    # Without a type nothing is built of them.
    ("optimizer.params.lr", 0.1, {}),
    ("scheduler.params.warmup_num_steps", 3, {}),
]


@pytest.mark.parametrize(("key", "value", "others"), _WRONG)
def test_what_cannot_hold_is_named(key: str, value: Any, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=key):
        _recipe({**others, key: value})


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"type": "OneBitAdam"}, "1-bit"),
        ({"type": "Lamb", "params": {"max_coeff": 1}}, "'Lamb': a file names (?s:.*) your own$"),
        # torch's, with a parameter of its own
        ({"type": "RMSprop", "params": {"alpha": 0.9}}, "such as torch.optim.RMSprop"),
        ({"type": "SGD", "params": {"betas": [0.9, 0.9]}}, "SGD has no such parameters"),
    ],
)
def test_optimizers_that_a_file_cannot_name(optimizer: Any, message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        _recipe({"optimizer": optimizer})
    assert _recipe({"optimizer": optimizer}, leave_out=["optimizer"]).optimizer is None


def test_schedules_of_torch_are_left_to_the_loop() -> None:
    file = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9}}}
    with pytest.raises(ConfigError, match=r'leave_out=\["scheduler"\] and build your own'):
        _recipe(file)
    assert _recipe(file, leave_out=["scheduler"]).shape is None


def test_never_is_infinite() -> None:
    assert _recipe({"steps_per_print": math.inf}).steps_per_print == 0


def _arguments(folder: Path) -> dict[str, Any]:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"per_device_train_batch_size": 2, "max_steps": 9}
    return auto_values(transformers.TrainingArguments(str(folder), use_cpu=True, **sizes))


@pytest.mark.parametrize(
    ("enabled", "dtype"), [("fp16.enabled", torch.float16), ("bf16.enabled", torch.bfloat16)]
)
def test_a_file_may_ask_for_what_arguments_do_not(
    enabled: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    auto = _arguments(tmp_path)
    assert _recipe({enabled: True}, auto=auto).config.param_dtype == dtype
    assert _recipe({enabled: "auto"}, auto=auto).config.param_dtype is None
    wanted = {**auto, enabled: True}  # as with the argument, which a CPU may not have
    assert _recipe({enabled: "auto"}, auto=wanted).config.param_dtype == dtype
    with pytest.raises(ConfigError, match=f"{enabled}: False in the file, True in auto"):
        _recipe({enabled: False}, auto=wanted)


def test_what_is_of_no_argument_is_not_compared(tmp_path: Path) -> None:
    warmup = {**_WARMUP, "scheduler.params.warmup_num_steps": "auto"}
    auto = _arguments(tmp_path)
    shape: Any = _recipe({**warmup, "scheduler.params.warmup_min_lr": 0.01}, auto=auto).shape
    assert (shape.warmup_min_lr, shape.warmup_num_steps) == (0.01, 1)
    shape = _recipe({**warmup, "scheduler.params.warmup_min_lr": "auto"}, auto=auto).shape
    assert shape.warmup_min_lr == 0
    pair = {**_ADAM, "optimizer.params.lr": "auto", "optimizer.params.betas": (0.9, 0.999)}
    assert _recipe(pair, auto=auto).optimizer is not None
