"""What is done to a model after the block that built it without memory is not lost in silence."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.checkpoint.runs import bitwise, full, sharded_by
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx.checkpoint import export_safetensors
from zerofx.errors import UnsupportedError


class Own(nn.Module):
    """Its values are not those of `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 30), nn.Linear(30, 2)
        self.register_buffer("scale", torch.full((3,), 2.0))
        nn.init.constant_(self.first.weight, 0.5)


def _built(change: Callable[[nn.Module], nn.Module] = lambda model: model) -> Own:
    torch.manual_seed(3)
    with zerofx.meta_init():
        return change(Own())  # pyright: ignore[reportReturnType]


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def _converted() -> None:
    changes: list[Callable[[nn.Module], nn.Module]] = [
        nn.Module.bfloat16,
        nn.Module.half,
        lambda model: model.to(torch.float64),
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
    ]
    for change in changes:
        changed = change(_built())
        for _ in range(2):
            with refused("first.weight", "last.bias", "scale", "at the end", kind=UnsupportedError):
                zerofx.shard(changed, sharded_by(3))
    some = _built()
    some.last.double()
    for _ in range(2):
        with refused("last.weight", "converted", kind=UnsupportedError):
            zerofx.shard(some, sharded_by(3))
    torch.manual_seed(3)
    bitwise(_values(zerofx.shard(_built(nn.Module.half), sharded_by(3))), _values(Own().half()))


def test_conversions_and_copies_after_the_block_are_refused() -> None:
    run_ranks(1, _converted)


def _written() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.in_features == 9:
            nn.init.normal_(module.weight, std=0.02)

    plain = Own().state_dict()
    writes: list[Callable[[Own], object]] = [
        lambda model: model.apply(init),
        lambda model: nn.init.uniform_(model.first.weight),
        lambda model: model.first.weight.fill_(3),
        lambda model: model.first.weight[3].zero_(),
        lambda model: model.first.weight.detach().copy_(torch.ones(30, 9)),
        lambda model: model.load_state_dict({"first.weight": plain["first.weight"]}, strict=False),
    ]
    made: list[Callable[[nn.Module], nn.Module]] = [
        lambda model: model,
        nn.Module.bfloat16,
        lambda model: copy.deepcopy(model).double(),
    ]
    for write in writes:
        for change in made:
            model = _built(change)
            loads = "load_state_dict" in write.__code__.co_names
            with torch.no_grad(), pytest.warns() if loads else contextlib.nullcontext():
                write(model)
            with refused("first.weight", "after the block", kind=UnsupportedError):
                zerofx.shard(model, sharded_by(3))
    model = _built()
    model.scale.zero_()  # pyright: ignore[reportCallIssue]
    with refused("scale", "after the block", kind=UnsupportedError):
        zerofx.shard(model, sharded_by(3))


def test_writes_after_the_block_are_refused() -> None:
    run_ranks(1, _written)


def _written_on_one() -> None:
    model = _built()
    with torch.no_grad():
        model.last.bias.fill_(1) if dist.get_rank() == 0 else None
    with refused("rank 0 and rank 1", "last.bias is", "as recorded", kind=UnsupportedError):
        zerofx.shard(model, sharded_by(3))
    copied = copy.deepcopy(_built()) if dist.get_rank() else _built()
    with refused("rank 0 and rank 1", kind=UnsupportedError):
        zerofx.shard(copied, sharded_by(3))


def test_what_one_rank_alone_does_is_refused_on_all() -> None:
    run_ranks(2, _written_on_one)


def _harmless() -> None:
    torch.manual_seed(3)
    wanted = Own()
    model = _built()
    assert model.float().train().to(torch.float32) is model
    model.first.requires_grad_(False)
    model.zero_grad()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    copy.copy(model).state_dict()
    model.last.weight = nn.Parameter(model.last.weight)
    model.first.weight = nn.Parameter(torch.ones(30, 9))
    wanted.first.weight = nn.Parameter(torch.ones(30, 9))
    zerofx.shard(model, sharded_by(3))
    bitwise(_values(model), _values(wanted))
    with torch.device("meta"):
        model.last.more = nn.Parameter(torch.zeros(2))
    with refused("last.more", "nothing says", kind=UnsupportedError):
        zerofx.shard(model, sharded_by(3))
    filled = _built().to_empty(device="cpu")
    filled.load_state_dict(_values(wanted))
    bitwise(_values(zerofx.shard(filled, sharded_by(3))), _values(wanted))


def test_what_changes_no_value_is_not_refused() -> None:
    run_ranks(1, _harmless)


def _from_file(folder: Path) -> None:
    torch.manual_seed(5)
    wanted = Own().bfloat16()
    export_safetensors(zerofx.shard(copy.deepcopy(wanted), sharded_by(3)), folder)
    model = _built().bfloat16()
    with torch.no_grad():
        model.first.weight.zero_()
    zerofx.load_safetensors(model, folder, sharded_by(3))
    bitwise(_values(model), _values(wanted))


def test_values_from_a_file_may_have_another_dtype(tmp_path: Path) -> None:
    run_ranks(2, _from_file, tmp_path / "out")
