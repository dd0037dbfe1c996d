"""Ranks draw the samples that a curriculum lets in, the same that DeepSpeed draws."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import zerofx
from tests.integrations.data_files import DRAWN, metric, write_index
from tests.integrations.examples import BASE, nested
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.data_keys import CURRICULUM, METRICS, SAMPLING
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.sampling import DataSampler

LENGTH = 200
EASE = {
    "length": [7 * i % 50 for i in range(LENGTH)],
    "rarity": [3 * i % 20 for i in range(LENGTH)],
}
STEPS = {"gradient_accumulation_steps": 2, "data_efficiency.seed": 3, f"{SAMPLING}.num_epochs": 2}


def _paced(kind: str, **pace: Any) -> dict[str, Any]:
    return {
        "schedule_type": kind,
        **{f"schedule_config.{key}": value for key, value in pace.items()},
    }


LINEAR = _paced("fixed_linear", total_curriculum_step=8, difficulty_step=10)
ROOT = _paced("fixed_root", total_curriculum_step=8, difficulty_step=25, root_degree=2)


@pytest.fixture
def metrics(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Keys of metrics, by kind."""
    length, rarity = (write_index(tmp_path, name, EASE[name]) for name in ("length", "rarity"))
    range_ = {"min_difficulty": 10, "max_difficulty": 50}
    parts = {"difficulty_type": "percentile", "min_difficulty": 50, "max_difficulty": 100}
    return {
        "value": metric("length", **length, **range_, **LINEAR),
        "percentile": metric("rarity", **rarity, **parts, **ROOT),
        "single": metric("length", **range_, **LINEAR, clustering_type="single_cluster"),
    }


def _recipe(flat: dict[str, Any], ranks: int = 2) -> Recipe:
    return zerofx.from_deepspeed(nested({**BASE, **flat}), world_size=ranks)


def _difficulties(**given: Any) -> list[float]:
    """Of eleven steps; all samples are in."""
    flat = metric("it", clustering_type="single_cluster", **given)
    sampler = _recipe(flat, 1).make_sampler(LENGTH)
    return [sampler.difficulties["it"] for _, _ in zip(range(11), sampler, strict=False)]


def test_difficulties_are_those_of_the_schedule() -> None:
    # DeepSpeed's own tests expect these, step by step.
    linear = _paced("fixed_linear", total_curriculum_step=8, difficulty_step=2)
    assert _difficulties(**linear) == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10, 10]
    pace = {"difficulty": [1, 2, 3, 4, 5], "max_step": [2, 4, 6, 8]}
    discrete = _difficulties(**_paced("fixed_discrete", **pace))
    assert discrete == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    root = _paced("fixed_root", total_curriculum_step=9, difficulty_step=3, root_degree=2)
    by_hand = [min(math.floor(2 + 8 * math.sqrt(n / 9)) // 3 * 3, 10) for n in range(1, 12)]
    assert _difficulties(**root) == by_hand
    assert by_hand == [3, 3, 6, 6, 6, 6, 9, 9, 9, 9, 9]
    back = _paced("fixed_discrete", difficulty=[4, 10, 6], max_step=[1, 2])
    assert _difficulties(**back)[:4] == [4, 10, 10, 10], "the largest difficulty stays"


@pytest.mark.parametrize(
    ("kinds", "first", "all_of_them"),
    [
        (["value"], [[65, 30], [29, 122], [9, 88], [8, 150]], 2089632500),
        (["percentile", "single"], [[48, 156], [81, 108], [158, 191], [123, 36]], 2512062527),
        (["value", "percentile"], [[187, 0], [122, 136], [116, 108], [95, 2]], 3343213083),
        (["single"], [[128, 6], [99, 117], [131, 190], [100, 169]], 2706408650),
        ([], [[128, 6], [99, 117], [131, 190], [100, 169]], 2706408650),
    ],
)
def test_draws_are_those_of_deepspeed(
    kinds: list[str], first: list[Any], all_of_them: int, metrics: dict[str, dict[str, Any]]
) -> None:
    """Recorded from the sampler of DeepSpeed 0.19.6: rank 1 of 2, two epochs."""
    flat = {**DRAWN, **STEPS}
    for kind in kinds:
        flat |= metrics[kind]
    drawn = list(_recipe(flat).make_sampler(LENGTH, place=1))
    assert len(drawn) == 100 and drawn[:4] == first
    assert zlib.crc32(str(drawn).encode()) == all_of_them


@pytest.mark.parametrize("kind", ["value", "percentile"])
def test_samples_come_in_as_they_become_admissible(
    kind: str, metrics: dict[str, dict[str, Any]]
) -> None:
    sampler = _recipe({**metrics[kind], "train_micro_batch_size_per_gpu": 4000}, 1).make_sampler(
        LENGTH, place=0
    )
    name = "length" if kind == "value" else "rarity"
    in_order = sorted(range(LENGTH), key=lambda sample: (EASE[name][sample], sample))
    counts = set()
    for _, batch in zip(range(9), sampler, strict=False):
        most = sampler.difficulties[name]
        count = sum(ease <= most for ease in EASE[name]) if kind == "value" else 2 * most
        assert set(batch) == set(in_order[: int(count)]), "so many draws meet every one"
        counts.add(count)
    assert len(counts) > 2 and max(counts) == LENGTH


def test_ranks_share_a_step_and_a_run_goes_on_with_the_next_samples(
    metrics: dict[str, dict[str, Any]],
) -> None:
    recipe = _recipe({**metrics["value"], **STEPS, "sequence_parallel_size": 2}, ranks=4)
    whole = [list(recipe.make_sampler(LENGTH, place=place)) for place in range(2)]
    single = list(_recipe({**metrics["value"], **STEPS, **_sizes(8, 1)}, 1).make_sampler(LENGTH))
    assert single[3] == whole[0][6] + whole[1][6] + whole[0][7] + whole[1][7]

    sampler = recipe.make_sampler(LENGTH, place=1)
    loader = DataLoader(torch.arange(LENGTH), batch_sampler=sampler, **recipe.loader)  # pyright: ignore[reportArgumentType]
    taken = [batch.tolist() for _, batch in zip(range(5), loader, strict=False)]
    state = sampler.state_dict()
    again = recipe.make_sampler(LENGTH, place=1)
    again.load_state_dict(state)
    assert taken + list(again) == whole[1]
    assert taken + list(sampler) == whole[1], "iterating goes on where it stopped"
    assert again.difficulties == sampler.difficulties == {"length": 50}


def _sizes(micro: int, accumulation: int) -> dict[str, int]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }


def _count(recipe: Recipe, length: int) -> int:
    return len(recipe.make_sampler(length, place=0))


def test_a_run_ends_after_its_epochs() -> None:
    flat = {**DRAWN, **_sizes(2, 2), f"{SAMPLING}.num_epochs": 3}
    assert _count(_recipe(flat), 8) == 2 * 3
    assert _count(_recipe(flat), 9) == 2 * 4, "the last step is filled up"
    dropping = _recipe({**flat, "dataloader_drop_last": True})
    assert _count(dropping, 9) == 2 * 3
    with pytest.raises(ConfigError, match="not enough for train_batch_size, 8"):
        _count(dropping, 2)
    epoch = [sample for batch in _draw_all(_recipe(flat, 1), 8)[:4] for sample in batch]
    assert sorted(epoch) == list(range(8)), "no sample twice in an epoch"


def _draw_all(recipe: Recipe, length: int) -> list[list[int]]:
    return list(recipe.make_sampler(length))


def test_schedules_of_ones_own(metrics: dict[str, dict[str, Any]]) -> None:
    own = {key: value for key, value in metrics["value"].items() if "schedule_config" not in key}
    recipe = _recipe({**own, f"{METRICS}.length.schedule_type": "custom"}, 1)
    assert f"{METRICS}.length.index_to_sample_path " in str(recipe), "long keys are whole"
    sampler = recipe.make_sampler(LENGTH, paces={"length": lambda step: 10 * step})
    assert [sampler.difficulties["length"] for _ in zip(range(6), sampler, strict=False)] == [
        10, 20, 30, 40, 50, 50,
    ]  # fmt: skip
    for paces in ({}, {"lenght": len}):
        with pytest.raises(ConfigError, match=r"curriculum_metrics\.length"):
            recipe.make_sampler(LENGTH, paces=paces)  # pyright: ignore[reportArgumentType]


def _sampler(flat: dict[str, Any], length: int = LENGTH) -> DataSampler:
    sampler = _recipe(flat, 1).make_sampler(length)
    next(iter(sampler))
    return sampler


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length.index_to_sample_path": "/no/where"}, r"length\.index_to_sample_path.*\.idx"),
        ({"length.min_difficulty": -1}, "no sample is easy enough for step 1"),
        ({"length.min_difficulty": 51}, "min_difficulty is 51, max_difficulty 50"),
        ({"length.min_difficulty": "10"}, "min_difficulty is '10'"),
        ({"length.difficulty_type": "percent"}, "difficulty_type is 'percent'"),
        ({"length.schedule_config.root_degree": 2}, r"schedule_config\.root_degree"),
        ({"length.schedule_config.difficulty_step": 0}, "difficulty_step is 0"),
        ({"length.schedule_type": "fixed_discrete"}, r"schedule_config\.max_step"),
        ({"length.min_dificulty": 3}, r"did you mean .*<name>\.min_difficulty"),
        ({"rarity.min_difficulty": 3}, r"curriculum_metrics\.rarity\.max_difficulty"),
    ],
)
def test_what_makes_no_sense(
    changes: dict[str, Any], message: str, metrics: dict[str, dict[str, Any]]
) -> None:
    changed = {f"{METRICS}.{key}": value for key, value in changes.items()}
    pace = {f"{METRICS}.length.schedule_config.total_curriculum_step": 10**6}
    with pytest.raises(ConfigError, match=message):
        _sampler({**metrics["value"], **pace, **changed})


def test_what_does_not_fit(metrics: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sample 199, the data set has 150"):
        _recipe(metrics["value"]).make_sampler(150)
    with pytest.raises(ConfigError, match="place is 2, but there are 2 groups"):
        _recipe(DRAWN).make_sampler(LENGTH, place=2)
    with pytest.raises(ConfigError, match="does not enable data_efficiency"):
        _recipe({**DRAWN, "data_efficiency.enabled": False}).make_sampler(LENGTH)
    silent = {key: value for key, value in DRAWN.items() if key != "data_efficiency.enabled"}
    with pytest.raises(
        ConfigError, match=r"data_efficiency\.enabled: around data_efficiency\.data"
    ):
        _recipe(silent)
    with pytest.raises(ConfigError, match="enabled without metrics"):
        _recipe({**DRAWN, f"{CURRICULUM}.enabled": True})
    (tmp_path / "length_samples.bin").write_bytes(b"1234")
    with pytest.raises(ConfigError, match=r"length_samples\.bin is empty, damaged"):
        _sampler(metrics["value"])
    (tmp_path / "length_samples.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(ConfigError, match=r"length_samples\.idx is empty, damaged"):
        _sampler(metrics["value"])
