"""A layer that sees some of the tokens while it trains."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.errors import ConfigError, UnsupportedError


@dataclasses.dataclass
class Route:
    """What a layer knows of its router; tensors, so that programs hold for all steps.

    Attributes:
        mask_name: the argument that is an attention mask, if any is.
        mask_at: its place behind the hidden states, if it can be passed by place.
        decodes: whether tokens look back; any tokens then have the mask of the first ones.
        batch_first: whether rows come before tokens.
        room: as long as the tokens that the layer sees are many.
        key: what they are drawn by.
    """

    mask_name: str | None
    mask_at: int | None
    decodes: bool
    batch_first: bool
    room: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    key: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))

    def draw(self, hidden: Tensor) -> Tensor:
        """For each row, the places of tokens that the layer sees, in order."""
        rows, tokens = hidden.shape[:2] if self.batch_first else (hidden.shape[1], hidden.shape[0])
        numbers = torch.arange(rows * tokens, device=hidden.device).view(rows, tokens)
        order = _scrambled(_scrambled(numbers) ^ self.key).argsort(1)
        return order[:, : self.room.shape[0]].sort(1).values

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], kept: Tensor, tokens: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A layer's other arguments; the mask is that of the tokens which are kept.

        Raises:
            UnsupportedError: it is an encoder's, and does not begin with the rows.
        """
        name, at = self.mask_name, self.mask_at
        if name in kwargs:
            return args, {**kwargs, name: self._among(kwargs[name], kept, tokens)}
        if at is not None and at < len(args):
            return (*args[:at], self._among(args[at], kept, tokens), *args[at + 1 :]), kwargs
        return args, kwargs

    def _among(self, mask: Tensor | None, kept: Tensor, tokens: int) -> Tensor | None:
        if mask is None:
            return None
        wide = [dim for dim in (-2, -1) if mask.dim() >= -dim and mask.shape[dim] == tokens]
        if self.decodes:
            for dim in wide:
                mask = mask.narrow(dim, 0, kept.shape[1])
            return mask
        if mask.dim() < 2 or mask.shape[0] not in (1, kept.shape[0]):
            raise UnsupportedError(
                f"{self.mask_name} has shape {tuple(mask.shape)} for {kept.shape[0]} rows",
                "give an encoder a mask whose first dimension are the rows",
            )
        for dim in wide[-(mask.dim() - 1) :]:
            mask = _pick(mask, dim + mask.dim(), kept)
        return mask


class Routed(nn.Module):
    """What layers that see some tokens only are besides: a base in front of their class."""

    token_route: Route

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's own, for all tokens; those that it does not see pass by."""
        route = self.token_route
        dim = int(route.batch_first)
        tokens = hidden_states.shape[dim]
        if not self.training or route.room.shape[0] >= tokens:
            return super().forward(hidden_states, *args, **kwargs)
        kept = route.draw(hidden_states)
        args, kwargs = route.arguments(args, kwargs, kept, tokens)
        places = kept if route.batch_first else kept.t()
        places = places.unsqueeze(-1).expand(-1, -1, hidden_states.shape[-1])
        found = super().forward(hidden_states.gather(dim, places), *args, **kwargs)
        first = found[0] if isinstance(found, tuple) else found
        whole = hidden_states.scatter(dim, places, first.to(hidden_states.dtype))
        return (whole, *found[1:]) if isinstance(found, tuple) else whole


def routed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer's routed sister; it has the same parameters, by the same names."""
    return type(f"Routed{cls.__name__}", (Routed, cls), {})


def place_of(argument: str, cls: type[nn.Module]) -> int | None:
    """Where a layer takes an argument, behind the hidden states; `None`: by name only.

    Raises:
        ConfigError: it does not take it.
    """
    wanted = inspect.signature(cls.forward).parameters
    by_place = [each.name for each in wanted.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    if argument in by_place:
        return by_place.index(argument) - 2  # behind self and the hidden states
    if argument not in wanted and all(e.kind is not e.VAR_KEYWORD for e in wanted.values()):
        raise ConfigError(
            f"random_ltd.model_mask_name is {argument!r}, no argument of {cls.__name__}.forward",
            f"it takes {', '.join(wanted)}",
        )
    return None


def _pick(values: Tensor, dim: int, kept: Tensor) -> Tensor:
    """What lies at places along a dimension, in each row; one row serves all."""
    shape = [1] * values.dim()
    shape[0], shape[dim] = kept.shape
    wide = values.expand(kept.shape[0], *values.shape[1:])
    size = [*wide.shape[:dim], kept.shape[1], *wide.shape[dim + 1 :]]
    return wide.gather(dim, kept.view(shape).expand(size))


def _scrambled(numbers: Tensor) -> Tensor:
    """Numbers below 2**32 that look random, one for each; no product needs more than 63 bits."""
    for shift in (16, 15, 16):
        numbers = (numbers ^ (numbers >> shift)) * 0x45D9F3B & 0xFFFFFFFF
    return numbers
