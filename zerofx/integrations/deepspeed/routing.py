"""`random_ltd`: layers that see some of the tokens, more of them from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.batch import Batch
from zerofx.integrations.deepspeed.curriculum import paced
from zerofx.integrations.deepspeed.data_keys import RANDOM_LTD
from zerofx.integrations.deepspeed.routed import Route, Routed, place_of, routed_class
from zerofx.integrations.deepspeed.settings import Settings

_CHOICES = {
    "model_type": ("encoder", "decoder"),
    "hidden_state_order": ("batch_seq_dim", "seq_batch_dim"),
    "random_ltd_schedule.schedule_type": ("fixed_linear",),
}
_COUNTS = (
    "total_layer_num",
    "random_ltd_layer_num",
    "random_ltd_schedule.min_value",
    "random_ltd_schedule.max_value",
    "random_ltd_schedule.schedule_config.require_steps",
    "random_ltd_schedule.schedule_config.seq_per_step",
)


@dataclasses.dataclass(frozen=True)
class Routing:
    """What the section asks for.

    Attributes:
        seed: of the tokens that are drawn.
        layers: those that see some tokens only, by their place among all.
        total_layers: of the model.
        mask_name: the argument of a layer that has its attention mask, if any has.
        decodes: whether a mask says that tokens look back; it then fits any tokens.
        batch_first: whether rows come before tokens.
        least, most: tokens at the first step, and at last.
        steps: to go from one to the other.
        multiple: which numbers of tokens are multiples of.
    """

    seed: int
    layers: tuple[int, ...]
    total_layers: int
    mask_name: str | None
    decodes: bool
    batch_first: bool
    least: int
    most: int
    steps: int
    multiple: int

    def kept(self, step: int) -> int:
        """Tokens that layers see after so many steps."""
        if self.least == self.most:
            return self.most
        return int(paced(step / self.steps, self.least, self.most, self.multiple))


def routing_of(settings: Settings) -> Routing | None:
    """The section; `None` if it is not enabled.

    Raises:
        ConfigError: keys are missing, or values make no sense.
    """
    given = settings.section(RANDOM_LTD)
    if not given.pop("enabled", False):
        return None
    needed = ("random_ltd_layer_id", *_CHOICES, *_COUNTS)
    absent = [f"{RANDOM_LTD}.{key}" for key in needed if key not in given]
    if absent:
        raise ConfigError("random_ltd is enabled, but keys are absent", "write them", absent)
    for key, choices in _CHOICES.items():
        if given[key] not in choices:
            raise ConfigError(
                f"{RANDOM_LTD}.{key} is {given[key]!r}", f"use one of {', '.join(choices)}"
            )
    total, number, *schedule = (given[key] for key in _COUNTS)
    _check_layers(given["random_ltd_layer_id"], total, number)
    _check_schedule(*schedule)
    return Routing(
        settings.get("data_efficiency.seed", 1234),
        tuple(sorted(given["random_ltd_layer_id"])),
        total,
        given.get("model_mask_name"),
        given["model_type"] == "decoder",
        given["hidden_state_order"] == "batch_seq_dim",
        *schedule,
    )


def _check_layers(layers: Sequence[Any], total: int, number: int) -> None:
    if (
        not number
        or len(layers) != number
        or len(set(layers)) != number
        or not set(layers) <= set(range(total))
    ):
        raise ConfigError(
            f"{RANDOM_LTD}.random_ltd_layer_id is {layers}, random_ltd_layer_num is {number}, "
            f"total_layer_num is {total}",
            "name each layer once, counted from 0, and their number",
        )


def _check_schedule(least: int, most: int, steps: int, multiple: int) -> None:
    if not 0 < multiple <= least <= most or steps < 1:
        raise ConfigError(
            f"{RANDOM_LTD}.random_ltd_schedule: from {least} to {most} tokens in {steps} steps, by "
            f"{multiple}",
            "keep seq_per_step <= min_value <= max_value; all are at least 1",
        )


class TokenRouter:
    """Says how many tokens layers see, and which; `Recipe.backward` and `Recipe.step` move it on.

    Args:
        routing: the schedule.
        batch: sizes.
        place: which group of ranks draws.
        layers: those that see some tokens only.

    Attributes:
        layer_tokens: what all layers saw, over all ranks, in steps that are done.
    """

    def __init__(
        self, routing: Routing, batch: Batch, place: int, layers: Sequence[nn.Module]
    ) -> None:
        self._routing, self._batch, self._place = routing, batch, place
        mask, how = routing.mask_name, (routing.decodes, routing.batch_first)
        places = [None if mask is None else place_of(mask, type(layer)) for layer in layers]
        self._routes = [Route(mask, at, *how) for at in places]
        classes = {cls: routed_class(cls) for cls in set(map(type, layers))}
        for layer, route in zip(layers, self._routes, strict=True):
            routed: Any = layer
            routed.__class__, routed.token_route = classes[type(layer)], route
        self.load_state_dict({"steps": 0, "layer_tokens": 0})

    @property
    def kept(self) -> int:
        """Tokens that layers see now."""
        return self._routing.kept(self._steps)

    def advance(self) -> None:
        """A micro-batch is done: the next one has other tokens."""
        self._micro += 1
        self._draw()

    def step(self) -> None:
        """An optimizer step is done, or skipped."""
        others = self._routing.total_layers - len(self._routes)
        seen = self.kept * len(self._routes) + self._routing.most * others
        self.layer_tokens += self._batch.train * seen
        self._steps, self._micro = self._steps + 1, 0
        self._draw()

    def state_dict(self) -> dict[str, int]:
        """Steps and tokens so far."""
        return {"steps": self._steps, "layer_tokens": self.layer_tokens}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many steps, with the tokens of a run that was not interrupted."""
        self._steps, self.layer_tokens = state["steps"], state["layer_tokens"]
        self._micro = 0
        self._draw()

    def _draw(self) -> None:
        # New tensors: a backward may still need the old ones.
        entropy = (self._routing.seed, self._place, self._steps, self._micro)
        keys = np.random.SeedSequence(entropy).generate_state(len(self._routes))
        room = torch.empty(self.kept, dtype=torch.uint8)
        for route, key in zip(self._routes, keys.tolist(), strict=True):
            route.room, route.key = room, torch.tensor(key)


def route_tokens(
    routing: Routing, batch: Batch, place: int | None, model: nn.Module, layer: type[nn.Module]
) -> TokenRouter:
    """Let layers of a model see some tokens only; see `Recipe.route_tokens`."""
    found = [module for module in model.modules() if isinstance(module, layer)]
    if is_routed(model):
        raise ConfigError(
            "layers of the model are routed already",
            "call route_tokens once; an Accelerator takes what it returned as its `router`",
        )
    if len(found) <= routing.layers[-1]:
        raise ConfigError(
            f"random_ltd_layer_id names layer {routing.layers[-1]}, but the model has {len(found)} "
            f"of {layer.__name__}",
            "layers are counted from 0; pass their class",
        )
    place = batch.place() if place is None else place
    return TokenRouter(routing, batch, place, [found[number] for number in routing.layers])


def is_routed(model: nn.Module) -> bool:
    """Whether layers of a model see some tokens only."""
    return any(isinstance(module, Routed) for module in model.modules())


def check_router(routing: Routing | None, router: TokenRouter | None) -> None:
    """Raise a `ConfigError` if a file routes tokens, and nothing would move on."""
    if routing is not None and router is None:
        raise ConfigError(f"{RANDOM_LTD} is enabled", "pass router=…, which route_tokens returns")
