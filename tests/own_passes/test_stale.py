"""Changed passes never meet a program that was compiled with others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerofx
from tests.fingerprint.chain import OPTIONS, Chain, messages_of_all
from tests.own_passes.wicked import Look, Scale
from tests.ranks import run_ranks
from zerofx.errors import ConfigError, DivergedError, ShardingError, UnsupportedError

X = torch.linspace(-1, 1, 32).view(4, 8)


def _loss(model: Any, *passes: Any, **options: Any) -> float:
    given = {**OPTIONS, "passes": list(passes), **options}
    loss: Tensor = torch.compile(model, backend="zero3", options=given)(X)
    return loss.item()


def _chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def _registers_late() -> None:
    model = _chain()
    usual = _loss(model)
    with zerofx.register_pass(Scale()):
        # The same options: Dynamo finds the program of before.
        with pytest.raises(ConfigError, match="registered since: scale"):
            _loss(model)
        assert _loss(_chain()) == 2 * usual
        other = _chain()
        run = torch.compile(other, backend="zero3", options=OPTIONS)
        assert run(X).item() == 2 * usual
    with pytest.raises(ConfigError, match="not registered any more: scale"):
        run(X)
    assert _loss(model) == usual


def test_registering_late_is_refused() -> None:
    run_ranks(2, _registers_late)


def _shards_and_registers() -> None:
    model = zerofx.shard(_chain(), zerofx.ZeroConfig(inner="eager", min_shard_numel=0))
    with zerofx.register_pass(Scale()), pytest.raises(UnsupportedError, match="Scale"):
        torch.compile(model, backend="zero3")(X)


def test_registering_between_sharding_and_compiling_is_refused() -> None:
    run_ranks(2, _shards_and_registers)


def _changes_options() -> None:
    model = _chain()
    usual = _loss(_chain())
    assert _loss(model, Scale(3.0)) == pytest.approx(3 * usual)
    assert _loss(model, Scale(3.0)) == pytest.approx(3 * usual)
    with pytest.raises(UnsupportedError, match=r"Scale\(factor=3.0\).*Scale\(factor=4.0\)"):
        _loss(model, Scale(4.0))
    with pytest.raises(ShardingError, match="other options"):
        zerofx.shard(model, zerofx.ZeroConfig(passes=(Scale(4.0),)))
    assert _loss(_chain(), Scale(4.0)) == pytest.approx(4 * usual)


def test_other_options_of_a_pass_are_seen() -> None:
    run_ranks(2, _changes_options)


def _edits_the_source(shared: str) -> list[float]:
    """Through Inductor, whose caches on disk stay warm."""
    folder = f"{shared}/{dist.get_rank()}"
    path = Path(folder) / "edited.py"
    text = (Path(__file__).parent / "wicked.py").read_text()
    losses: list[float] = []
    with patch.object(sys, "path", [folder, *sys.path]), patch("sys.dont_write_bytecode", True):
        path.write_text(text)
        module = importlib.import_module(path.stem)
        for factor in ("self.factor", "5.0", "self.factor"):
            path.write_text(text.replace("self.factor)", f"{factor})"))
            module = importlib.reload(module)
            losses.append(_loss(_chain(), module.Scale(), inner="inductor"))
    return losses


def test_edited_source_is_compiled_anew(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    for first, second, third in run_ranks(2, _edits_the_source, str(tmp_path), timeout=200):
        assert first == third and second == pytest.approx(2.5 * first)


def _differs_in_options() -> None:
    _loss(_chain(), Scale(2.0 + dist.get_rank()))


def _differs_in_registration() -> None:
    with zerofx.register_pass(zerofx.before("schedule", Look())):
        if dist.get_rank() == 1:
            zerofx.register_pass(Scale())
        _loss(_chain())


def _differs_in_buckets() -> None:
    _loss(_chain(), bucket_bytes=100 * dist.get_rank())


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (_differs_in_options, "rank 1: pass scale: Scale(factor=3.0), code "),
        (_differs_in_registration, "rank 1: pass scale: Scale(factor=2.0), code "),
        (_differs_in_buckets, "rank 1: pass fuse_unshards: FuseUnshards(target_bytes=100"),
    ],
)
def test_ranks_with_other_passes_are_told(job: Any, line: str) -> None:
    for message in messages_of_all(2, job):
        assert line in message


def _differs_in_source(folder: str) -> str:
    rank = dist.get_rank()
    own = Path(folder) / str(rank)
    own.mkdir()
    text = (Path(__file__).parent / "wicked.py").read_text()
    (own / "unlike.py").write_text(text + f"# rank {rank}\n")
    with patch.object(sys, "path", [str(own), *sys.path]):
        module = importlib.import_module("unlike")
        try:
            _loss(_chain(), module.Look())
        except DivergedError as error:
            return str(error)
        finally:
            sys.modules.pop("unlike")
    return "nothing"


def test_ranks_with_other_source_are_told(tmp_path: Path) -> None:
    for message in run_ranks(2, _differs_in_source, str(tmp_path)):
        assert message.count("pass look: Look(), code ") == 2
