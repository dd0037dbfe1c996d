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
import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.cli.architectures import architecture_of, inputs_of, most_length_of
from zerofx.errors import ConfigError
from zerofx.page.build import read_object

_CALL = re.compile(r"(?P<name>[^()]+?)\s*(?:\((?P<arguments>.*)\))?", re.S)
_INPUT = re.compile(r"(?:(?P<name>\w+)=)?(?P<dtype>\w+)\[(?P<shape>[^\]]*)\]")
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
        most_length: that the model has positions for; 0 if no input has a length.
    """

    text: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[tuple[Tensor, ...], dict[str, Tensor]]]
    most_length: int

    def length(self, asked: int | None, otherwise: int) -> int:
        """What was asked for, or else `otherwise`, if the model takes that much."""
        return min(otherwise, self.most_length or otherwise) if asked is None else asked


def find_target(text: str, specs: list[str]) -> Target:
    """The model that `text` names.

    Args:
        text: TARGET of the command line.
        specs: of inputs, `int64[B,S]` or `name=float32[B,3,32,32]`. By default token ids, or what
            `zerofx.cli.architectures` knows of a model of transformers.

    Raises:
        ConfigError: it names nothing that can be built.
    """
    match = _CALL.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"target {text!r} cannot be read", _FORMS)
    name, arguments = match["name"], _arguments(text, match["arguments"])
    most = sys.maxsize
    if ":" in name and not Path(name).exists():
        build, specs = _factory(text, name, arguments), specs or ["int64[B,S]"]
    else:
        architecture, config = _from_config(name, arguments)
        specs, most = specs or inputs_of(architecture, config), most_length_of(config)

        def build() -> nn.Module:
            model: nn.Module = architecture(copy.deepcopy(config))
            return model.train()

    parsed = [_input(spec) for spec in specs]
    if not any("S" in extents for _, _, extents in parsed):
        most = 0
    return Target(text, build, lambda batch, length: _make_inputs(parsed, batch, length), most)


def _arguments(text: str, inner: str | None) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({inner or ''})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"the arguments of target {text!r} cannot be read",
            "write key=value pairs of plain Python values, such as (width=512, bias=False)",
        ) from error


def _factory(text: str, name: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    module_name, _, path = name.partition(":")
    _find_like_python()
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"target {text!r} cannot be imported: {error}", _FORMS) from error
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
        return read_object(path, "name a configuration that transformers wrote")
    if name in known:
        return {"model_type": name}
    if _is_module(name):
        raise ConfigError(f"target {name!r} is a module, no factory", f"write {name}:Factory")
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
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
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"a configuration of {kind} has no field {unknown[0]!r}",
            f"{hint}known: {', '.join(sorted(known))}",
        )


def _input(spec: str) -> tuple[str, torch.dtype, list[str]]:
    match = _INPUT.fullmatch(spec.strip())
    dtype = getattr(torch, match["dtype"], None) if match else None
    extents = [part.strip() for part in match["shape"].split(",")] if match else []
    good = all(extent in ("B", "S") or extent.isdigit() for extent in extents)
    if match is None or not isinstance(dtype, torch.dtype) or not good:
        raise ConfigError(
            f"input {spec!r} cannot be read",
            "write dtype[shape], with B for the batch size and S for the length: int64[B,S], "
            "or pixels=float32[B,3,32,32]",
        )
    return match["name"] or "", dtype, extents


def _make_inputs(
    parsed: list[tuple[str, torch.dtype, list[str]]], batch: int, length: int
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    sizes = {"B": batch, "S": length}
    named: dict[str, Tensor] = {}
    plain: list[Tensor] = []
    for name, dtype, extents in parsed:
        value = torch.zeros([sizes.get(e) or int(e) for e in extents], dtype=dtype)
        if name:
            named[name] = value
        else:
            plain.append(value)
    return tuple(plain), named
