"""Weights in safetensors files, read row by row."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zerofx.errors import CheckpointError
from zerofx.runtime.domain import Domain
from zerofx.runtime.session import Session
from zerofx.sharding import materialise
from zerofx.sharding.paths import local_path
from zerofx.sharding.rows import row_range

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Weights:
    """The tensors of a file, or of a folder; open inside `with`.

    Raises:
        CheckpointError: there are none, or a file is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = local_path(path)
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self._done: set[str] = set()

    def __enter__(self) -> Weights:
        opened: dict[Path, Any] = {}
        for file in files_of(self._path):
            with readable(file):
                opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        places = places_of(self._path, {file: each.keys() for file, each in opened.items()})
        self._files = {name: opened[file] for name, file in places.items()}
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def check(self, model: nn.Module, strict: bool) -> None:
        """Compare names and shapes, before anything is read.

        Raises:
            CheckpointError: lists what does not fit.
        """
        problems: list[str] = []
        known: set[str] = set()
        for names, value in _tensors(model):
            known.update(names)
            found = [name for name in names if name in self._files]
            if not found:
                problems += [f"{names[0]} is not in the files"] if strict else []
            elif (shape := self._files[found[0]].get_slice(found[0]).get_shape()) != [*value.shape]:
                problems.append(f"{found[0]}: {shape} in the files, {[*value.shape]} in the model")
        if strict:
            problems += [f"{name} is only in the files" for name in self._files.keys() - known]
        if problems:
            raise CheckpointError(
                f"the weights in {self._path} do not fit {type(model).__name__}",
                "build the model that they belong to; strict=False lets names differ",
                problems,
            )

    def make_values(self, model: nn.Module, session: Session) -> dict[int, Tensor]:
        """Rows of parameters on the meta device, by `id`; buffers are put in their place."""
        given: dict[int, Tensor] = {}
        for names, value in _tensors(model):
            name = self._name_of(names)
            if name and value.is_meta:
                domain = session.domain_for(value.shape)
                is_param = isinstance(value, nn.Parameter)
                rows = self._rows(name, domain) if is_param else self._whole(name)
                self._done.add(name)
                given[id(value)] = rows.to(device=session.device, dtype=value.dtype)
        materialise.put_buffers(model, given)
        if any(id(value) not in given for _, value in materialise.on_meta(model)):
            given.update(materialise.make_values(model, session, given))
        return given

    def fill(self, model: nn.Module, session: Session) -> None:
        """Read into the shards and buffers of a sharded model, but for what was read before."""
        states = {id(state.param): state for state in session.states}
        with torch.no_grad():
            for names, value in _tensors(model):
                name = self._name_of(names)
                if name in self._done:
                    continue
                if name and id(value) in states:
                    state = states[id(value)]
                    state.shard.copy_(self._rows(name, state.domain))
                    state.dirty = True
                elif name:
                    value.copy_(self._whole(name))

    def _name_of(self, names: Iterable[str]) -> str:
        return next((name for name in names if name in self._files), "")

    def _rows(self, name: str, domain: Domain) -> Tensor:
        part = self._files[name].get_slice(name)
        if not domain.layout.sharded:
            return self._whole(name)
        start, stop = row_range(part.get_shape()[0], domain)
        return part[start:stop]

    def _whole(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


def _tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters and persistent buffers, each with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Tensor | None] = {**module._parameters}
        skipped = module._non_persistent_buffers_set
        own.update({key: each for key, each in module._buffers.items() if key not in skipped})
        for key, value in own.items():
            if value is not None:
                name = plain_name(f"{path}.{key}" if path else key)
                found.setdefault(id(value), ([], value))[0].append(name)
    return list(found.values())


def plain_name(name: str) -> str:
    """A name in a model without what torch.compile adds where it wrapped submodules."""
    return name.replace("_orig_mod.", "")


@contextlib.contextmanager
def readable(file: Path) -> Iterator[None]:
    """Say which safetensors file could not be read.

    Raises:
        CheckpointError: it is damaged, or the disk is.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", "write it again") from error


def files_of(path: Path) -> list[Path]:
    """The safetensors files of a folder, or the one that `path` is.

    Raises:
        CheckpointError: there are none, or their index is damaged.
    """
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        return [path / file for file in sorted(set(_listed(path / INDEX).values()))]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    raise CheckpointError(
        f"{path} is no safetensors file, and holds neither {SINGLE} nor {INDEX}",
        "pass the file, or the folder that save_pretrained or export_safetensors wrote",
    )


def places_of(path: Path, names: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """The file of each name: the one that the index says, where several have it.

    Args:
        path: of the folder or file.
        names: in each of its files.

    Raises:
        CheckpointError: the index says none of those that have a name.
    """
    listed = _listed(path / INDEX) if len(names) > 1 else {}
    holders: dict[str, list[Path]] = {}
    for file, inside in names.items():
        for name in inside:
            holders.setdefault(name, []).append(file)
    found: dict[str, Path] = {}
    for name, files in holders.items():
        chosen = [file for file in files if file.name == listed.get(name)] or files
        if len(chosen) > 1:
            raise CheckpointError(
                f"{name} is in {', '.join(each.name for each in files)}, and {path / INDEX} says "
                "none of them",
                "write in weight_map which file has it, or export the weights again",
            )
        found[name] = chosen[0]
    return found


def _listed(index: Path) -> dict[str, str]:
    """The file of each name by an index, all beside it."""
    try:
        listed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        files = sorted(set(listed.values()))
        beside = all(Path(file).name == file for file in files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {error}", "fetch or export it again") from error
    if not beside:
        raise CheckpointError(f"{index} names files of other folders", "put them beside it", files)
    return listed
