"""A pass from an installed package runs; if it breaks the program, it is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.fingerprint.chain import Chain, fit
from tests.own_passes.installed import importable, install
from tests.ranks import RanksFailed, run_ranks
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError
from zerofx.passes.pipelines import pipeline
from zerofx.passes.registry import with_registered


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(install(tmp_path_factory.mktemp("wicked")))


def _fit(site: str, choice: str, ranks: tuple[int, ...] = (0, 1)) -> tuple[list[float], list[str]]:
    if dist.get_rank() not in ranks:
        return fit(Chain(), 3), []
    with importable(site, choice):
        losses = fit(Chain(), 3)
        return losses, list(sys.modules["wicked_passes"].SEEN)


def _plain() -> list[float]:
    return fit(Chain(), 3)


def _messages(*args: object) -> Iterator[tuple[str, str]]:
    """Kind and message of the error on each rank."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _fit, *args, timeout=60)
    assert set(failed.value.failures) == {0, 1}
    for failure in failed.value.failures.values():
        yield failure.kind, failure.message


def test_it_runs_and_numbers_stay(site: str) -> None:
    plain = run_ranks(2, _plain)
    for (losses, seen), wanted in zip(run_ranks(2, _fit, site, "look"), plain, strict=True):
        assert losses == wanted
        assert "layers.0.weight" in seen or seen == [""], "a bucket of several has no parameter"


def test_an_early_free_is_refused(site: str) -> None:
    for kind, message in _messages(site, "free early"):
        assert kind == "VerificationError" and "[free_follows_readers]" in message
        assert "after pass free_early" in message and "layers.0.weight" in message


def test_collectives_in_another_order_on_one_rank_are_refused(site: str) -> None:
    for kind, message in _messages(site, "swap gathers"):
        assert kind == "DivergedError" and "issue different collectives" in message
        assert "layers.1.weight" in message and "added passes swap_gathers" in message


def test_a_package_on_one_rank_alone_is_refused(site: str) -> None:
    for kind, message in _messages(site, "look", (1,)):
        assert kind == "DivergedError" and "rank 1: pass look: Look()" in message


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("no pass", "entry point wicked of package wicked-passes 1.2: 'no pass' is no pass"),
        ("replace frees", "look replace insert_frees (entry point wicked of package wicked-passes"),
        ("unknown", "package wicked-passes 1.2 failed to load wicked_passes:chosen: KeyError"),
    ],
)
def test_a_useless_entry_point_is_named(site: str, choice: str, words: str) -> None:
    with importable(site, choice), pytest.raises(ConfigError) as refused:
        pipeline(with_registered(ZeroConfig()))
    assert words in str(refused.value)


def test_an_entry_point_that_does_not_import_is_named(tmp_path: Path) -> None:
    site = str(install(tmp_path, function="missing"))
    with importable(site, "look"), pytest.raises(ConfigError, match="uninstall wicked-passes"):
        with_registered(ZeroConfig())


def test_an_entry_point_may_hold_several_changes(site: str) -> None:
    with importable(site, "two"):
        names = [each.name for each in pipeline(with_registered(ZeroConfig()))]
    assert names[-1] == "look" and "schedule" not in names
    assert with_registered(ZeroConfig()).passes == ()
