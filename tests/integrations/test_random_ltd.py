"""Layers see random tokens while they train, more of them from step to step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.integrations.data_files import ROUTED
from tests.integrations.examples import BASE, nested
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.deepspeed.data_keys import RANDOM_LTD
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.routing import TokenRouter

ROWS, TOKENS, WIDTH = 3, 24, 5


def _recipe(ranks: int = 1, /, **keys: Any) -> Recipe:
    flat = {**BASE, **ROUTED, **{f"{RANDOM_LTD}.{key}": value for key, value in keys.items()}}
    return zerofx.from_deepspeed(nested(flat), world_size=ranks)


class Layer(nn.Module):
    """Remembers what it is given, and adds one."""

    seen: Tensor
    mask: Tensor | None

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, int]:
        self.seen, self.mask = hidden, mask
        return hidden + 1, 7


class Layers(nn.Module):
    """Three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(Layer() for _ in range(3))


def _routed(recipe: Recipe, **how: Any) -> tuple[list[Any], TokenRouter]:
    layers = Layers()
    router = recipe.route_tokens(layers, Layer, **how)
    assert router is not None
    return list(layers.all), router


def _numbered() -> Tensor:
    """Hidden states that say which row and token they are of."""
    numbers = torch.arange(ROWS * TOKENS, dtype=torch.float32)
    return numbers.view(ROWS, TOKENS, 1).expand(-1, -1, WIDTH).clone()


def _places(layer: Any) -> Tensor:
    """The tokens that a layer was given, when hidden states were numbered."""
    return layer.seen[..., 0].long() % TOKENS


def test_the_number_of_tokens_is_that_of_the_schedule() -> None:
    _, router = _routed(_recipe())
    kept, consumed = [], 0
    for step in range(11):
        want = math.floor(step / 8 * (16 - 4) + 4)
        want = min(want - want % 2, 16)
        kept.append(router.kept)
        assert router.kept == want
        # DeepSpeed's count: two of three layers see some tokens, of a batch of two.
        assert router.layer_tokens == consumed
        consumed += 2 * (2 * want + 16)
        router.step()
    assert kept == [4, 4, 6, 8, 10, 10, 12, 14, 16, 16, 16]


def test_layers_see_some_tokens_in_order_and_the_others_pass_by() -> None:
    layers, _ = _routed(_recipe())
    hidden = _numbered()
    out, rest = layers[0](hidden)
    places = _places(layers[0])
    assert places.shape == (ROWS, 4) and (places.diff(dim=1) > 0).all() and rest == 7
    want = hidden.clone()
    for row in range(ROWS):
        want[row, places[row]] += 1
    assert torch.equal(out, want)
    assert torch.equal(layers[2](hidden)[0], hidden + 1), "layer 2 is not named"
    layers[0].eval()
    assert torch.equal(layers[0](hidden)[0], hidden + 1)
    layers[0].train()
    assert torch.equal(layers[0](hidden[:, :4])[0], hidden[:, :4] + 1), "no more than it keeps"


def test_gradients_reach_every_token() -> None:
    layers, _ = _routed(_recipe())
    hidden = _numbered().requires_grad_()
    out, _ = layers[0](hidden)
    (out * out).sum().backward()
    assert hidden.grad is not None and torch.equal(hidden.grad, 2 * out)


def test_tokens_before_rows() -> None:
    layers, _ = _routed(_recipe(hidden_state_order="seq_batch_dim"))
    hidden = _numbered().transpose(0, 1)
    out, _ = layers[1](hidden)
    assert layers[1].seen.shape == (4, ROWS, WIDTH)
    changed = (out - hidden)[..., 0].t()
    assert torch.equal(changed.nonzero()[:, 1].view(ROWS, 4), _places(layers[1]).t())


@pytest.mark.parametrize("heads", [1, 2])
def test_masks_of_decoders_and_encoders(heads: int) -> None:
    mask = torch.rand(ROWS, heads, TOKENS, TOKENS)
    layers, _ = _routed(_recipe(model_mask_name="mask"))
    layers[0](_numbered(), mask=mask)
    assert torch.equal(layers[0].mask, mask[:, :, :4, :4])
    layers[0](_numbered(), mask=None)
    assert layers[0].mask is None
    layers, _ = _routed(_recipe(model_mask_name="mask", model_type="encoder"))
    for given, wide in ((mask, mask), (mask[:, :, :1], mask[:, :, :1]), (mask[:1], mask[[0] * 3])):
        layers[0](_numbered(), mask=given)
        for row, places in enumerate(_places(layers[0])):
            want = wide[row][..., places]
            want = want[:, places] if given.shape[2] > 1 else want
            assert torch.equal(layers[0].mask[row], want)
    layers[0](_numbered(), mask=mask[:, 0, 0])
    assert torch.equal(layers[0].mask, mask[:, 0, 0].gather(1, _places(layers[0])))
    with pytest.raises(UnsupportedError, match="whose first dimension are the rows"):
        layers[0](_numbered(), mask=mask[:2])
    layers[0](_numbered(), mask[:, 0, 0])
    assert torch.equal(layers[0].mask, mask[:, 0, 0].gather(1, _places(layers[0])))
    layers[0](_numbered())
    assert layers[0].mask is None


def _drawn(router: TokenRouter, layers: list[Any], times: int) -> Iterator[list[Any]]:
    for _ in range(times):
        for layer in layers[:2]:
            layer(_numbered())
        yield [_places(layer).tolist() for layer in layers[:2]]
        router.advance()


def test_tokens_differ_by_row_layer_micro_batch_step_and_place() -> None:
    layers, router = _routed(_recipe(2), place=0)
    found = list(_drawn(router, layers, 2))
    router.step()
    found += list(_drawn(router, layers, 2))
    others, other = _routed(_recipe(2), place=1)
    found += list(_drawn(other, others, 2))
    sets = [tuple(row) for both in found for rows in both for row in rows]
    assert len(sets) == 6 * 2 * ROWS and len(set(sets)) == len(sets)
    again, resumed = _routed(_recipe(2), place=0)
    resumed.load_state_dict(router.state_dict())
    assert resumed.state_dict() == router.state_dict() and resumed.kept == router.kept
    assert list(_drawn(resumed, again, 2)) == found[2:4]


def test_tokens_are_drawn_evenly() -> None:
    layers, router = _routed(_recipe())
    together = torch.zeros(TOKENS, TOKENS)
    for rows, _ in _drawn(router, layers, 400):
        for places in torch.tensor(rows):
            together[places[:, None], places] += 1
    one = 400 * ROWS * 4 / TOKENS
    two = one * 3 / (TOKENS - 1)
    pairs = together[~torch.eye(TOKENS, dtype=torch.bool)]
    assert (together.diag() - one).abs().max() < 4 * math.sqrt(one)
    assert (pairs - two).abs().max() < 5 * math.sqrt(two)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"random_ltd_layer_num": 3}, "random_ltd_layer_num is 3"),
        ({"random_ltd_layer_id": [0, 3]}, "total_layer_num is 3"),
        ({"random_ltd_layer_id": [0, 0]}, r"random_ltd_layer_id is \[0, 0\]"),
        ({"model_type": "both"}, "model_type is 'both'"),
        ({"hidden_state_order": "bsh"}, "hidden_state_order is 'bsh'"),
        ({"random_ltd_schedule.schedule_type": "fixed_root"}, "use one of fixed_linear"),
        ({"random_ltd_schedule.min_value": 1}, "seq_per_step <= min_value"),
        ({"random_ltd_schedule.max_value": 3}, "from 4 to 3 tokens"),
        ({"random_ltd_schedule.max_value": None}, r"random_ltd_schedule\.max_value"),
    ],
)
def test_files_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _recipe(**changes)


def test_calls_that_make_no_sense() -> None:
    with pytest.raises(UnsupportedError, match="layer_token_lr_schedule: DeepSpeed"):
        _recipe(**{"layer_token_lr_schedule": {"enabled": True}})
    _recipe(**{"layer_token_lr_schedule": {"enabled": False, "warmup_type": "linear"}})
    assert _recipe(enabled=False).route_tokens(Layers(), Layer) is None
    recipe, layers = _recipe(), Layers()
    with pytest.raises(ConfigError, match="names layer 1, but the model has 0 of Linear"):
        recipe.route_tokens(layers, nn.Linear)
    with pytest.raises(ConfigError, match="model_mask_name is 'attention'"):
        _recipe(model_mask_name="attention").route_tokens(layers, Layer)
    recipe.route_tokens(layers, Layer)
    with pytest.raises(ConfigError, match="routed already"):
        recipe.route_tokens(layers, Layer)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for forgotten in (
        lambda: recipe.backward(torch.zeros(()), recipe.make_scaler("cpu")),
        lambda: recipe.step(optimizer, recipe.make_scaler("cpu")),
    ):
        with pytest.raises(ConfigError, match="pass router"):
            forgotten()
