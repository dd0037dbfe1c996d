"""Ranks that share a model, or sequences, as a file asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.deepspeed.settings import Settings
from zerofx.integrations.tensor_parallel.parts import TensorParallel
from zerofx.integrations.tensor_parallel.rules import PRESETS, Rule, rules_of

_SECTION = "tensor_parallel"


def tensor_parallel(settings: Settings) -> TensorParallel | None:
    """How ranks share a model; `None`: they do not.

    Raises:
        ConfigError: a preset is unknown, rules are written wrongly, or keys contradict each other.
    """
    size = settings.get(f"{_SECTION}.autotp_size", 0)
    _check_passes(settings.get("compile.passes", ()), settings, size)
    for alias in ("tensor_parallel", "tp"):
        other = settings.get(f"{_SECTION}.{alias}.tp_size", 1)
        if other not in (1, size):
            raise ConfigError(
                f"{_SECTION}.{alias}.tp_size is {other}, and autotp_size is {size}",
                "say autotp_size alone",
            )
    if size <= 1:
        return None
    return TensorParallel(size, _rules(settings), strict=_own(settings, "strict_mode", False))


def sequence_parallel(settings: Settings) -> int | None:
    """The ranks that share a sequence which zerofx cuts; `None`: the model cuts it, or nobody.

    Raises:
        UnsupportedError: they share a model, too.
    """
    size = settings.get("sequence_parallel_size", 1)
    if "autosp" not in settings.get("compile.passes", ()) or size <= 1:
        return None
    if settings.get(f"{_SECTION}.autotp_size", 0) > 1:
        raise UnsupportedError(
            "compile.passes names 'autosp', and autotp_size is above 1: sequences are cut for "
            "models that are whole",
            "use one of them",
        )
    return size


def _rules(settings: Settings) -> tuple[Rule, ...]:
    """Rules of the file come before those of the preset, unless they stand alone."""
    preset = settings.get(f"{_SECTION}.preset_model")
    if preset is not None and preset.lower() not in PRESETS:
        raise ConfigError(f"preset_model is {preset!r}", f"use one of {', '.join(PRESETS)}")
    named = PRESETS[preset.lower()] if preset is not None else ()
    own = rules_of(_own(settings, "layer_specs", []))
    return own + (named if not own or _own(settings, "use_default_specs", True) else ())


def _own(settings: Settings, name: str, default: Any) -> Any:
    return settings.get(f"{_SECTION}.partition_config.{name}", default)


def _check_passes(passes: Sequence[str], settings: Settings, size: int) -> None:
    """DeepSpeed's passes by name: what they do is done where other keys ask for it."""
    stage = settings.get("zero_optimization.stage", 0)
    needs = {
        "z1": (stage in (1, 2), "zero_optimization.stage 1 or 2"),
        "z3": (stage == 3, "zero_optimization.stage 3"),
        "autotp": (size > 1, "tensor_parallel.autotp_size above 1"),
        "autosp": (True, ""),  # of whole sequences, where sequence_parallel_size is 1
    }
    for name in passes:
        if name not in needs:
            raise ConfigError(f"compile.passes names {name!r}", f"use {', '.join(needs)}")
        good, wanted = needs[name]
        if not good:
            raise ConfigError(f"compile.passes names {name!r}, which needs {wanted}", "set it")
