"""`Source`: what lies in a checkpoint, whoever wrote it, to be read tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from zerofx.checkpoint.snapshot import State, leaves


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        like: shape and dtype, on the meta device.
        read: makes the full value, on the CPU.
    """

    like: Tensor
    read: Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class Unread:
    """An object in a file that is no tensor; to read it would run what its pickle says."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint, of which nothing but names and shapes was read so far.

    Attributes:
        kind: what it is, for people.
        format: the same, for programs.
        state: nested as `zerofx.checkpoint.save` nests it, with `Stored` for tensors.
        files: those that hold it.
    """

    kind: str
    format: Literal["dcp", "deepspeed", "safetensors"]
    state: State
    files: tuple[Path, ...]

    def tensors(self, prefix: str = "") -> dict[str, Stored]:
        """Tensors whose names begin with `prefix`, by the rest of the name."""
        return {
            name.removeprefix(prefix): value
            for name, value in leaves(self.state)
            if isinstance(value, Stored) and name.startswith(prefix)
        }


def meta(shape: torch.Size | list[int], dtype: torch.dtype) -> Tensor:
    """What says shape and dtype."""
    return torch.empty(shape, dtype=dtype, device="meta")
