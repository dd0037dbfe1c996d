"""What TARGET on a command line means: a factory of models, or a Hugging Face configuration.

    package.module:Factory(width=512)      a callable that returns an `nn.Module`
    path/to/config.json, path/to/folder    a Hugging Face configuration on disk
    llama(num_hidden_layers=32)            a model type of transformers, with overrides

Nothing is fetched. `build` is called inside a fake tensor mode, so that no weight takes memory.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zerofx.cli.architectures import architecture_of, inputs_of, most_length_of
from zerofx.cli.inputs import Input, check_forward, make_inputs, read_input
from zerofx.errors import ConfigError, ZeroFxError, nearest
from zerofx.frontend.breaks import line_of
from zerofx.page.build import read_object

_CALL = re.compile(r"(?P<name>[^()]+?)\s*(?:\((?P<arguments>.*)\))?", re.S)
_FORMS = (
    "write package.module:factory, package.module:factory(key=value), the path of a config.json, "
    "or a model type of transformers such as llama(num_hidden_layers=32)"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A model to look at.

    Attributes:
        text: as it was written.
        build: makes the model.
        inputs: makes one batch: positional and named inputs of `forward`, for `(batch, length)`.
        extents: what shapes of inputs have: `B`, `S`, and numbers.
        most_length: that the model has positions for.
    """

    text: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[tuple[Tensor, ...], dict[str, Tensor]]]
    extents: frozenset[str]
    most_length: int

    @property
    def has_length(self) -> bool:
        """Whether an input has a length."""
        return "S" in self.extents

    def sizes(
        self, batch: int | None, length: int | None, otherwise: tuple[int, int]
    ) -> tuple[int, int]:
        """Batch size and length: what was asked for, or else `otherwise`, if the model takes that.

        Raises:
            ConfigError: no input has what was asked for.
        """
        for option, letter, asked in (("--batch", "B", batch), ("--length", "S", length)):
            if asked is not None and letter not in self.extents:
                raise ConfigError(
                    f"{option} {asked}: no input of target {self.text!r} has {letter}",
                    f"leave {option} out, or write {letter} into an --input, as in int64[B,S]",
                )
        most = min(otherwise[1], self.most_length)
        return otherwise[0] if batch is None else batch, most if length is None else length


def find_target(text: str, specs: list[str]) -> Target:
    """The model that `text` names.

    Args:
        text: TARGET of the command line.
        specs: of inputs, `int64[B,S]` or `name=float32[B,3,32,32]`. By default token ids, or what
            `zerofx.cli.architectures` knows of a model of transformers.

    Raises:
        ConfigError: it names nothing that can be built.
    """
    name, inner = _split(text)
    arguments = _arguments(text, inner)
    most = sys.maxsize
    if ":" in name and not os.path.exists(name):
        make, specs = _factory(text, name, arguments), specs or ["int64[B,S]"]
    else:
        architecture, config = _from_config(name, arguments)
        specs, most = specs or inputs_of(architecture, config), most_length_of(config)

        def make() -> nn.Module:
            model: nn.Module = architecture(copy.deepcopy(config))
            return model.train()

    parsed = [read_input(spec) for spec in specs]

    def inputs(batch: int, length: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return make_inputs(parsed, batch, length)

    extents = frozenset(extent for each in parsed for extent in each.extents)
    return Target(text, lambda: _build(text, make, parsed), inputs, extents, most)


def _split(text: str) -> tuple[str, str | None]:
    """The name, and what is in parentheses behind it; paths may have some of their own."""
    text = text.strip()
    ends = [place for place, letter in enumerate(text) if letter == "(" and text.endswith(")")]
    for end in (len(text), *reversed(ends)):
        if os.path.exists(name := text[:end].rstrip()):
            return name, text[end + 1 : -1] if end < len(text) else None
    match = _CALL.fullmatch(text)
    if match is None:
        raise ConfigError(f"target {text!r} cannot be read", _FORMS)
    return match["name"], match["arguments"]


def _arguments(text: str, inner: str | None) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({inner or ''})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("values without names")
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"the arguments of target {text!r} cannot be read",
            "write key=value pairs of plain Python values, such as (width=512, bias=False)",
        ) from error


def _build(text: str, make: Callable[[], nn.Module], parsed: list[Input]) -> nn.Module:
    """What `make` makes; its forward takes the inputs, as far as their names and number go."""
    try:
        model = make()
    except ZeroFxError:
        raise
    except Exception as error:
        raise ConfigError(
            f"target {text!r} makes no model: {_said(error)}",
            "give arguments that it takes; weights have no values while it makes the model",
        ) from error
    check_forward(text, model, parsed)
    return model


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__} at {line_of(error)}" + (f": {lines[0]}" if lines else "")


def _factory(text: str, name: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    module_name, _, path = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise ConfigError(f"target {text!r} names no module", _FORMS)
    _find_like_python()
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"target {text!r} cannot be imported: {error}", _FORMS) from error
    except Exception as error:
        raise ConfigError(
            f"target {text!r} cannot be imported: {_said(error)}", f"mend {module_name}"
        ) from error
    _check_call(text, found, arguments)

    def build() -> nn.Module:
        model = found(**arguments)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{name} returned {type(model).__name__}, no nn.Module", _FORMS)
        return model

    return build


def _check_call(text: str, found: Any, arguments: dict[str, Any]) -> None:
    if not callable(found):
        raise ConfigError(f"target {text!r} is a {type(found).__name__}, no factory", _FORMS)
    try:
        signature = inspect.signature(found)
    except ValueError:
        return  # of some built-in functions nothing is known
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"target {text!r}: {error}", f"it takes {signature}") from error


def _find_like_python() -> None:
    """Modules of the working directory, as `python -m` finds them."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def _from_config(name: str, overrides: dict[str, Any]) -> tuple[Any, Any]:
    """A class of transformers, and its configuration."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"target {name!r} is for transformers, which is not installed",
            f"pip install 'zerofx[hf]'; or {_FORMS}",
        ) from error
    fields = {**_fields(name, CONFIG_MAPPING), **overrides}
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"{name} has model_type {kind!r}, which transformers does not know",
            'name one in the file, as "model_type": "llama"; or make the model yourself: '
            "package.module:factory",
        )
    # Caches are for generation; they would hold keys and values while training.
    config = AutoConfig.for_model(kind, **{"use_cache": False, **fields})
    _refuse_unknown(kind, config, overrides)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # files say which; any will do without values
    return architecture_of(config), config


def _fields(name: str, known: Iterable[str]) -> dict[str, Any]:
    """Of the configuration that `name` is: a file, a folder of one, or a model type."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"folder {name} has no config.json", _FORMS)
    if path.is_file():
        return read_object(
            path, "name a configuration that transformers wrote, or write package.module:factory"
        )
    if name in known:
        return {"model_type": name}
    if _is_module(name):
        raise ConfigError(f"target {name!r} is a module, no factory", f"write {name}:Factory")
    hint = nearest(name, known)
    raise ConfigError(f"target {name!r} is neither a file nor a model type", hint + _FORMS)


def _is_module(name: str) -> bool:
    _find_like_python()
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _refuse_unknown(kind: str, config: Any, overrides: dict[str, Any]) -> None:
    known = set(type(config)().to_dict())
    unknown = [key for key in overrides if key not in known]
    if unknown:
        raise ConfigError(
            f"a configuration of {kind} has no field {unknown[0]!r}",
            f"{nearest(unknown[0], known)}known: {', '.join(sorted(known))}",
        )
