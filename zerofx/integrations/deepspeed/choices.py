"""The optimizer and the schedule that a file names, checked before anything is built."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.deepspeed.schedules import SHAPES, Shape
from zerofx.integrations.deepspeed.settings import Settings, is_number

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
_NOT_FOR_TORCH = ("adam_w_mode", "torch_adam", "set_grad_none", "fp32_optimizer_states")


@dataclasses.dataclass(frozen=True)
class OptimizerChoice:
    """A class of torch and what it is built with.

    Attributes:
        cls: Adam, AdamW or SGD.
        params: of the class.
        corrects_bias: whether Adam's first steps make up for averages that begin at zero.
    """

    cls: type[torch.optim.Optimizer]
    params: dict[str, Any]
    corrects_bias: bool = True

    def build(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer over parameters, or groups of them."""
        made = self.cls(params, **self.params)
        if not self.corrects_bias:
            made.register_step_pre_hook(_count_from_infinity)
            made.register_load_state_dict_post_hook(_count_from_infinity)
        return made


def refuse_other_types(content: Mapping[str, Any], leave_out: Collection[str]) -> None:
    """See that the optimizer and the schedule are known: keys of other ones would not be.

    Args:
        content: of the file.
        leave_out: sections, or keys, to train without.

    Raises:
        UnsupportedError: a 1-bit optimizer, or one that zerofx does not build from a file.
        ConfigError: no such schedule.
    """
    optimizer, schedule = (_named(each, content, leave_out) for each in ("optimizer", "scheduler"))
    if optimizer is not None and optimizer.lower() not in _CLASSES:
        one_bit = optimizer.lower() in _ONE_BIT
        why = "1-bit optimizers do not go with ZeRO" if one_bit else "a file names Adam, AdamW, SGD"
        own = f", such as torch.optim.{optimizer}" if hasattr(torch.optim, optimizer) else ""
        raise UnsupportedError(
            f"optimizer.type is {optimizer!r}: {why}",
            f'name one of the three, or pass leave_out=["optimizer"] and build your own{own}',
        )
    if schedule is not None and schedule not in SHAPES:
        raise ConfigError(
            f"scheduler.type is {schedule!r}",
            f'use one of {", ".join(SHAPES)}, or pass leave_out=["scheduler"] and build your own',
        )


def _named(section: str, content: Mapping[str, Any], leave_out: Collection[str]) -> str | None:
    given = content.get(section)
    name = given.get("type") if isinstance(given, Mapping) else None
    if section in leave_out or f"{section}.type" in leave_out or name == "auto":
        return None
    return name if isinstance(name, str) else None


def optimizer_choice(settings: Settings) -> OptimizerChoice | None:
    """The optimizer of the file, if it names one.

    Raises:
        ConfigError: parameters that the optimizer does not have, or cannot use; or the section
            names no optimizer.
    """
    name = _type_of("optimizer", settings)
    if name is None:
        return None
    given = settings.section("optimizer.params")
    params = {key: value for key, value in given.items() if key not in _NOT_FOR_TORCH}
    corrects_bias = params.pop("bias_correction", True) if name.lower() != "sgd" else True
    adam_w = given.get("adam_w_mode", True)
    cls = torch.optim.AdamW if adam_w and name.lower() == "adam" else _CLASSES[name.lower()]
    if cls is torch.optim.AdamW and not given.get("torch_adam", False):
        params = {"weight_decay": 0.0, **params}
    known = inspect.signature(cls).parameters
    unknown = [key for key in params if key not in known]
    if unknown:
        raise ConfigError(f"torch's {cls.__name__} has no such parameters", "drop them", unknown)
    _check_optimizer(params)
    return OptimizerChoice(cls, params, corrects_bias)


def _type_of(section: str, settings: Settings) -> str | None:
    """What a section names; without a name none of its keys would have an effect."""
    name, given = settings.get(f"{section}.type"), settings.section(section)
    if name is None and given:
        raise ConfigError(
            f"the section {section} has no type",
            f'write "type" into it, or pass leave_out=["{section}"] and build your own',
            [f"{section}.{key}" for key in given],
        )
    return name


def _check_optimizer(params: dict[str, Any]) -> None:
    """What torch's classes refuse when they are built, by the names of keys."""
    if any(not 0 <= beta < 1 for beta in params.get("betas", ())):
        raise ConfigError(
            f"optimizer.params.betas is {params['betas']!r}", "write two numbers from 0 to below 1"
        )
    if params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        raise ConfigError(
            "optimizer.params.nesterov is True without a momentum, or with dampening",
            'give "momentum" a positive number, and leave "dampening" out',
        )
    if params.get("foreach") and params.get("fused"):
        raise ConfigError(
            "optimizer.params.foreach and optimizer.params.fused are both True", "keep one of them"
        )


def _count_from_infinity(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Let Adam take its steps for late ones, whose bias is `beta ** inf`, which is 0."""
    for group in optimizer.param_groups:
        on_device = group["capturable"] or group["fused"]
        for param in group["params"]:
            if param in optimizer.state:
                optimizer.state[param]["step"].fill_(torch.inf)
            elif param.grad is not None:
                device = param.device if on_device else "cpu"
                names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
                state = {name: torch.zeros_like(param) for name in names}
                step = torch.full((), torch.inf, dtype=torch.float32, device=device)
                optimizer.state[param] = {"step": step, **state}


def shape_choice(settings: Settings) -> Shape | None:
    """The schedule of the file, if it names one.

    Raises:
        ConfigError: none is named, or parameters that it does not have, lacks or cannot use.
    """
    name = _type_of("scheduler", settings)
    if name is None:
        return None
    shape = SHAPES[name]
    params = settings.section("scheduler.params")
    last = params.pop("last_batch_iteration", -1)  # of all of them: where a schedule goes on
    if type(last) is not int or last < -1:
        raise ConfigError(
            f"scheduler.params.last_batch_iteration is {last!r}", "write a step, or -1 for none yet"
        )
    wanted = inspect.signature(shape).parameters
    unknown = [key for key in params if key not in wanted]
    absent = [
        key
        for key, each in wanted.items()
        if each.default is inspect.Parameter.empty and key not in params
    ]
    if unknown or absent:
        raise ConfigError(
            f"scheduler.params do not fit {name}",
            f"it has {', '.join(wanted)}",
            [*(f"{key}: not of {name}" for key in unknown), *(f"{key}: absent" for key in absent)],
        )
    _check_params(shape, params)
    return shape(**params)


def _check_params(shape: type[Shape], params: dict[str, Any]) -> None:
    for field in dataclasses.fields(shape):  # pyright: ignore[reportArgumentType]
        key, kind = field.name, str(field.type).removesuffix(" | None")
        if key in params and kind in _WANTED and not _fits(kind, params[key]):
            raise ConfigError(
                f"scheduler.params.{key} is {params[key]!r}", f"write {_WANTED[kind]}"
            )
    positive = (
        "warmup_num_steps",
        "total_num_steps",
        "cycle_first_step_size",
        "lr_range_test_step_size",
    )
    for key in positive:
        value = params.get(key, 1)
        if value <= 0:
            raise ConfigError(f"scheduler.params.{key} is {value!r}", "use a positive number")
    if params.get("cycle_second_step_size", 0) < 0:
        raise ConfigError(
            f"scheduler.params.cycle_second_step_size is {params['cycle_second_step_size']!r}",
            "use a number of at least 0",
        )
    if params.get("warmup_type", "log") not in ("log", "linear"):
        raise ConfigError(
            f"scheduler.params.warmup_type is {params['warmup_type']!r}", 'use "log" or "linear"'
        )


_WANTED = {
    "PerGroup": "a number, or a list of one for each parameter group",
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
}
"""By how a shape annotates its parameters."""


def _fits(kind: str, value: Any) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int" and is_number(value):
        return value == int(value)
    several = kind == "PerGroup" and isinstance(value, list | tuple)
    return all(map(is_number, value)) if several else is_number(value)
