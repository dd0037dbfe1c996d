"""`dynamic_batching`: packs of samples up to so many tokens, and rates that follow."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from tests.integrations.data_files import PACKED, metric, write_indexed
from tests.integrations.examples import BASE, nested
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.data_keys import BATCHING, SAMPLING
from zerofx.integrations.deepspeed.recipe import Recipe

LENGTHS = [7 * sample % 13 + 1 for sample in range(60)]
ADAM = {"optimizer.type": "AdamW", "optimizer.params.lr": 0.25}


def _recipe(ranks: int = 1, flat: dict[str, Any] | None = None, **keys: Any) -> Recipe:
    own = {f"{BATCHING}.{key}": value for key, value in keys.items()}
    sizes = {"train_micro_batch_size_per_gpu": 1, "data_efficiency.seed": 3}
    return zerofx.from_deepspeed(
        nested({**BASE, **PACKED, **sizes, **own, **(flat or {})}), world_size=ranks
    )


@pytest.mark.parametrize(
    ("order", "first", "samples"),
    [
        ("dataloader", [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]], [11, 11, 11, 10, 10]),
        ("random", [[21, 17, 39], [28, 55, 22], [10, 26, 6], [46, 3]], [11, 10, 11, 9, 11]),
        ("seqlen", [[0, 13, 26], [39, 52, 2], [15, 28, 41], [54, 4, 17]], [12, 12, 12, 8, 8, 6]),
    ],
)
def test_packs_are_those_of_deepspeed(order: str, first: Any, samples: list[int]) -> None:
    """Recorded from DeepSpeed 0.19.6: steps of four packs."""
    keys = {"max_tokens": 25, "max_batch_size": 3, "sequence_picking_order": order}
    epochs = {f"{SAMPLING}.num_epochs": 2}
    whole = _recipe(4, epochs, **keys)
    ranks = [list(whole.make_sampler(60, place=p, lengths=LENGTHS)) for p in range(4)]
    assert [own[0] for own in ranks] == first
    assert [sum(map(len, step)) for step in zip(*ranks, strict=True)] == 2 * samples

    spread = {**epochs, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    pairs = [
        list(_recipe(2, spread, **keys).make_sampler(60, place=p, lengths=LENGTHS))
        for p in range(2)
    ]
    assert [own[0] for own in pairs] == [first[0] + first[2], first[1] + first[3]]
    split = {**epochs, "gradient_accumulation_steps": 2}
    in_turn = list(_recipe(2, split, **keys).make_sampler(60, place=1, lengths=LENGTHS))
    assert in_turn[:2] == [first[1], first[3]]


@pytest.mark.parametrize("method", ["linear", "sqrt", "none"])
@pytest.mark.parametrize("schedule", [False, True])
def test_rates_follow_the_samples_of_a_step(method: str, schedule: bool) -> None:
    warm = {"scheduler.type": "WarmupLR", "scheduler.params.warmup_max_lr": 0.25}
    flat = {**ADAM, **(warm if schedule else {})}
    recipe = _recipe(4, flat, max_tokens=25, max_batch_size=3, lr_scaling_method=method)
    sampler = recipe.make_sampler(60, place=0, lengths=LENGTHS)
    assert len(sampler) == 1000 * 5
    optimizer = recipe.make_optimizer([torch.nn.Parameter(torch.zeros(1))])
    plain = zerofx.from_deepspeed(nested({**BASE, **flat})).make_scheduler(
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    )
    scheduler = recipe.make_scheduler(optimizer, sampler)
    if method == "none" and not schedule:
        assert scheduler is None
        return
    assert scheduler is not None
    for samples in [11, 11, 11, 10, 10, 11, 11]:
        usual = 0.25 if plain is None else plain.get_last_lr()[0]
        factor = {"linear": samples / 4, "sqrt": math.sqrt(samples / 4), "none": 1}[method]
        assert optimizer.param_groups[0]["lr"] == pytest.approx(usual * factor, abs=1e-12)
        optimizer.step()
        scheduler.step()
        if plain is not None:
            plain.optimizer.step()
            plain.step()
    assert "_factors" not in scheduler.state_dict()


def test_lengths_are_read_and_long_samples_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "seqlen").mkdir()
    rows = [[length] for length in LENGTHS]
    write_indexed(tmp_path / "seqlen" / "seqlen_sample_to_metric", rows)
    recipe = _recipe(max_tokens=12, metrics_path=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        packs = list(recipe.make_sampler(60))[:20]
    assert "4 samples have more than max_tokens (12)" in caplog.text
    assert packs == list(recipe.make_sampler(60, lengths=LENGTHS))[:20]
    assert not any(LENGTHS[sample] == 13 for pack in packs for sample in pack)
    with pytest.raises(ConfigError, match="60 lengths for 61 samples"):
        recipe.make_sampler(61)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_tokens": None}, "enabled without max_tokens"),
        ({"lr_scaling_method": "cubic"}, "lr_scaling_method is 'cubic'"),
        ({"sequence_picking_order": "length"}, "sequence_picking_order is 'length'"),
        ({"min_batch_size": 3, "max_batch_size": 2}, "min_batch_size is 3, max_batch_size 2"),
        ({"min_batch_size": 3, "max_tokens": 13}, r"3 samples \(min_batch_size\) have more"),
        ({"max_tokens": 0}, "the samples make 0"),
        ({"metrics_path": "/no/where"}, r"dynamic_batching\.metrics_path is '/no/where"),
    ],
)
def test_what_makes_no_sense(keys: dict[str, Any], message: str) -> None:
    lengths = None if "metrics_path" in keys else LENGTHS
    with pytest.raises(ConfigError, match=message):
        _recipe(**keys).make_sampler(60, lengths=lengths)


def test_what_does_not_go_together() -> None:
    with pytest.raises(ConfigError, match="enable one of them"):
        _recipe(flat=metric())
    with pytest.raises(ConfigError, match="pass the sampler to make_scheduler"):
        _recipe(flat=ADAM).make_scheduler(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    with pytest.raises(ConfigError, match="dynamic_batching is not enabled"):
        _recipe(enabled=False).make_sampler(60, lengths=LENGTHS)
