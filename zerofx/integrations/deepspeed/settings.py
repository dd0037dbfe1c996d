"""Which keys are there, what "auto" means in each, and which of them nobody can serve."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.deepspeed.data_keys import DATA_KEYS, METRICS, NAME
from zerofx.integrations.deepspeed.key import IfAuto, Key, Type
from zerofx.integrations.deepspeed.model_keys import MODEL_KEYS
from zerofx.integrations.deepspeed.read import flatten
from zerofx.integrations.deepspeed.training_keys import TRAINING_KEYS
from zerofx.integrations.deepspeed.zero_keys import ZERO_KEYS

KEYS: dict[str, Key] = {
    key.path: key for key in (*TRAINING_KEYS, *DATA_KEYS, *ZERO_KEYS, *MODEL_KEYS)
}
_SECTIONS = {path.rpartition(".")[0] for path in KEYS if "." in path}  # what may only be an object


def key_of(path: str) -> Key | None:
    """What is known about a path, in which sections may have names of the user's."""
    if path.startswith(f"{METRICS}."):
        own = path.removeprefix(f"{METRICS}.").partition(".")[2]
        known = KEYS.get(f"{METRICS}.{NAME}.{own}")
        return known and dataclasses.replace(known, path=path)
    return KEYS.get(path)


@dataclasses.dataclass(frozen=True)
class Row:
    """How one key was understood.

    Attributes:
        key: its path.
        given: the value in the file.
        taken: what that came to.
        meaning: what follows from it.
    """

    key: str
    given: Any
    taken: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a file asks for.

    Attributes:
        values: by path; without keys that are off, left out, or "auto" without a value.
        rows: all keys of the file, in its order.
    """

    values: dict[str, Any]
    rows: tuple[Row, ...]

    def get(self, path: str, default: Any = None) -> Any:
        """The value of a key, or what DeepSpeed takes without it."""
        return self.values.get(path, default)

    def section(self, prefix: str) -> dict[str, Any]:
        """All values below `prefix`, by their own names."""
        start = f"{prefix}."
        return {k.removeprefix(start): v for k, v in self.values.items() if k.startswith(start)}


def understand(
    content: Mapping[str, Any], auto: Mapping[str, Any], leave_out: Collection[str]
) -> Settings:
    """Check every key, and say what it comes to.

    Raises:
        ConfigError: keys are unknown, values have a wrong type, or "auto" is not explained.
        UnsupportedError: the file asks for what zerofx does not have.
    """
    flat = flatten(_renamed(content), KEYS)
    auto = {_present(path): value for path, value in auto.items()}
    leave_out = [_present(path) for path in leave_out]
    _check_known(flat, auto, leave_out)
    used = {path: value for path, value in flat.items() if not _below(path, leave_out)}
    _check_served(used)
    filled = _fill(used, auto)
    _check_switches(filled)
    values, rows = {}, []
    for path, given in flat.items():
        key = key_of(path)
        if key is None or path not in used:
            rows.append(Row(path, given, "left out", "as the caller asks"))
            continue
        idle = _idle(key, filled)
        if not idle:
            values[path] = _typed(key, filled[path])
        rows.append(Row(path, given, idle or _taken(key, values[path]), key.meaning))
    return Settings(values, tuple(rows))


def _idle(key: Key, filled: Mapping[str, Any]) -> str:
    """Why a key sets nothing in this file; empty if it does."""
    if key.kind in ("missing", "refused"):
        return "off"
    if key.path not in filled:
        return "by default"
    if key.stages and filled.get("zero_optimization.stage", 0) not in key.stages:
        return "not at this stage"
    if any(filled.get(switch) is not True for switch in _switches(key.path)):
        return "off"
    return ""


def _switches(path: str) -> list[str]:
    """Keys that enable the sections around a key."""
    parts = path.split(".")
    around = [".".join([*parts[:depth], "enabled"]) for depth in range(1, len(parts))]
    return [switch for switch in around if switch in KEYS and switch != path]


def _check_switches(filled: Mapping[str, Any]) -> None:
    unsaid = {
        switch: path
        for path, value in filled.items()
        if path.endswith(".enabled") and value is True
        for switch in _switches(path)
        if switch not in filled
    }
    if unsaid:
        raise ConfigError(
            "sections are enabled inside of others that say neither true nor false",
            "say it: DeepSpeed documents false as the default, and takes it for true",
            [f"{switch}: around {path}" for switch, path in unsaid.items()],
        )


def _taken(key: Key, value: Any) -> str:
    if key.kind == "always":
        return "always so"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _renamed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Sections by their present names."""
    if "bf16" in content and "bfloat16" in content:
        raise ConfigError(
            "the file has bf16, and bfloat16, which is an older name of the same", "keep bf16"
        )
    return {_present(name): value for name, value in content.items()}


def _present(path: str) -> str:
    """A path without DeepSpeed's older name of a section."""
    section, dot, key = path.partition(".")
    return f"bf16{dot}{key}" if section == "bfloat16" else path


def _below(path: str, names: Collection[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _check_known(
    flat: Mapping[str, Any], auto: Mapping[str, Any], leave_out: Collection[str]
) -> None:
    unknown = [path for path in flat if key_of(path) is None and not _below(path, leave_out)]
    if unknown:
        raise ConfigError(
            "DeepSpeed has no such keys",
            "correct them, or pass leave_out=[…] to read the rest",
            [_with_nearest(path) for path in unknown],
        )
    # One dictionary of values may serve many files; what is left out must be there.
    _refuse_stray(
        "auto names keys that DeepSpeed does not have", [n for n in auto if key_of(n) is None]
    )
    _refuse_stray(
        "leave_out names keys that the file does not have",
        [name for name in leave_out if not any(_below(path, [name]) for path in flat)],
    )


def _refuse_stray(problem: str, names: list[str]) -> None:
    if names:
        remedy = "use paths with dots, as in zero_optimization.stage"
        raise ConfigError(problem, remedy, [_with_nearest(name) for name in names])


def _with_nearest(path: str) -> str:
    if path in _SECTIONS:
        return f"{path}: an object is expected here"
    near = difflib.get_close_matches(path, KEYS, n=1)
    return f"{path}: did you mean {near[0]}?" if near else path


def _check_served(used: Mapping[str, Any]) -> None:
    asked = [
        key
        for path, value in used.items()
        if (key := key_of(path)) and key.kind in ("missing", "refused") and not _is_off(key, value)
    ]
    if asked:
        raise UnsupportedError(
            "the file asks for what zerofx does not have",
            f"train without it: pass leave_out={[key.path for key in asked]}",
            [f"{key.path}: {key.meaning}" for key in asked],
        )


def _is_off(key: Key, value: Any) -> bool:
    if any(value == off and type(value) is type(off) for off in key.off):
        return True
    if isinstance(value, Mapping):
        if "enabled" in value and not value["enabled"]:
            return True
        if "device" in value:
            return value["device"] in ("none", None, "auto")
        parts = value.values()
        return all(_is_off(key, each) if isinstance(each, Mapping) else not each for each in parts)
    if key.off:
        return value is None
    return not value or value in ("none", "auto")


def _fill(used: Mapping[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """Values with "auto" replaced, or left away where there is a default."""
    against = [
        f"{path}: {used[path]!r} in the file, {value!r} in auto"
        for path, value in auto.items()
        if path in used and not isinstance(value, IfAuto) and not _agrees(used[path], value)
    ]
    if against:
        raise ConfigError("auto contradicts the file", "correct one of them", against)
    filled = {
        path: _meant(auto[path]) if path in auto and value == "auto" else value
        for path, value in used.items()
    }
    open_keys = [
        path
        for path, value in filled.items()
        if value == "auto" and (key := key_of(path)) and key.needed
    ]
    if open_keys:
        raise ConfigError(
            'the file says "auto" where only you know the value',
            f"pass auto={{{', '.join(f'{path!r}: …' for path in open_keys)}}}",
            open_keys,
        )
    return {path: value for path, value in filled.items() if value not in ("auto", None)}


def _meant(value: Any) -> Any:
    return value.value if isinstance(value, IfAuto) else value


def _agrees(given: Any, wanted: Any) -> bool:
    pair = [list(each) if isinstance(each, tuple) else each for each in (given, wanted)]
    return given == "auto" or pair[0] == pair[1]


def _typed(key: Key, value: Any) -> Any:
    if key.path == "steps_per_print" and value == math.inf:
        return 0  # Accelerate writes "never" so
    number = is_number(value)
    good: dict[Type, Callable[[], bool]] = {
        "bool": lambda: isinstance(value, bool),
        "count": lambda: number and value >= 0 and value == int(value),
        "number": lambda: number and value >= 0,
        "text": lambda: isinstance(value, str),
        "texts": lambda: isinstance(value, list) and all(isinstance(v, str) for v in value),
        "numbers": lambda: isinstance(value, list) and all(map(is_number, value)),
        "pair": lambda: _is_pair(value),
        "any": lambda: True,
    }
    if not good[key.type]():
        wanted = {
            "count": "a whole number of at least 0",
            "number": "a number of at least 0",
            "texts": "a list of texts",
            "numbers": "a list of numbers",
            "pair": "a list of two numbers",
        }
        raise ConfigError(
            f"{key.path} is {value!r}", f"write {wanted.get(key.type, f'a {key.type}')}"
        )
    return int(value) if key.type == "count" else value


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
