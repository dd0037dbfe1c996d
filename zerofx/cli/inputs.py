"""Inputs of a target's forward, as `--input` describes them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerofx.errors import ConfigError

_INPUT = re.compile(r"(?:(?P<name>\w+)=)?(?P<dtype>\w+)\[(?P<shape>[^\]]*)\]")


@dataclasses.dataclass(frozen=True)
class Input:
    """One input.

    Attributes:
        name: of the argument; empty for the next one in order.
        dtype: of its values.
        extents: its shape: `B` for the batch size, `S` for the length, and numbers.
    """

    name: str
    dtype: torch.dtype
    extents: tuple[str, ...]


def read_input(spec: str) -> Input:
    """What `int64[B,S]` or `name=float32[B,3,32,32]` says.

    Raises:
        ConfigError: it is neither.
    """
    match = _INPUT.fullmatch(spec.strip())
    dtype = getattr(torch, match["dtype"], None) if match else None
    extents = tuple(part.strip() for part in match["shape"].split(",")) if match else ()
    good = all(extent in ("B", "S") or extent.isdecimal() for extent in extents)
    if match is None or not isinstance(dtype, torch.dtype) or not good:
        raise ConfigError(
            f"input {spec!r} cannot be read",
            "write dtype[shape], with B for the batch size and S for the length: int64[B,S], "
            "or pixels=float32[B,3,32,32]",
        )
    return Input(match["name"] or "", dtype, extents)


def make_inputs(
    inputs: Sequence[Input], batch: int, length: int
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Zeros: those without names in order, and the others by name."""
    sizes = {"B": batch, "S": length}
    named: dict[str, Tensor] = {}
    plain: list[Tensor] = []
    for each in inputs:
        value = torch.zeros([sizes.get(e) or int(e) for e in each.extents], dtype=each.dtype)
        if each.name:
            named[each.name] = value
        else:
            plain.append(value)
    return tuple(plain), named


def check_forward(text: str, model: nn.Module, inputs: Sequence[Input]) -> None:
    """Refuse inputs that the model's forward does not take, by number and names.

    Raises:
        ConfigError: says what it takes.
    """
    if model._forward_pre_hooks:
        return  # they may change what is given
    try:
        forward = inspect.signature(model.forward)
    except ValueError:
        return  # of some functions nothing is known
    named = {each.name: None for each in inputs if each.name}
    try:
        forward.bind(*[None for each in inputs if not each.name], **named)
    except TypeError as error:
        raise ConfigError(
            f"inputs of target {text!r}: {error}",
            f"say --input for each of {forward}, in order or by name, as mask=float32[B,8]",
        ) from error
