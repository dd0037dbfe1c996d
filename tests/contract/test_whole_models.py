"""What a model brings along when it is sharded, and what is shared with its `state_dict()`."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zerofx
from tests.contract.loops import config, full, net
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError
from zerofx.sharding.shard import session_of


def _buffers() -> list[Tensor]:
    """Buffers that lie in all sorts of ways, after sharding."""
    rank = dist.get_rank()
    grid = torch.arange(12.0).view(3, 4) + 100 * rank
    kinds = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool)
    model = nn.Linear(8, 8)
    model.register_buffer("transposed", grid.t())
    model.register_buffer("columns", grid[:, :2])
    model.register_buffer("expanded", grid[0].expand(3, 4))
    model.register_buffer("repeated", torch.tensor(float(rank)).expand(3, 4))
    model.register_buffer("strided", (torch.arange(10.0) + 100 * rank)[::2])
    model.register_buffer("number", torch.tensor(float(rank)))
    for number, kind in enumerate(kinds):
        model.register_buffer(f"kind{number}", torch.full((3,), 1 - rank).to(kind))
    zerofx.shard(model, config(3))
    return [buffer.clone() for buffer in model.buffers()]


def test_buffers_are_rank_0s_however_they_lie() -> None:
    zero, one = run_ranks(2, _buffers)
    grid = torch.arange(12.0).view(3, 4)
    wanted = [grid.t(), grid[:, :2], grid[0].expand(3, 4), torch.zeros(3, 4)]
    for got, want in zip(zero, [*wanted, torch.arange(10.0)[::2]], strict=False):
        assert torch.equal(got, want)
    for ours, theirs in zip(zero, one, strict=True):
        assert torch.equal(
            *(each.contiguous().view(-1).view(torch.uint8) for each in (ours, theirs))
        )


def _loaded(stage: int, folder: str) -> None:
    model = zerofx.shard(net(lambda: nn.Linear(7, 13, bias=False)), config(stage))
    run = torch.compile(model, backend=f"zero{stage}")
    x = torch.ones(1, 7)
    wanted = run(x).sum().item()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        model.weight.zero_()
    assert run(x).sum().item() == 0
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    assert run(x).sum().item() == wanted
    for value in model.state_dict().values():
        value.to_local().mul_(2)
    assert run(x).sum().item() == 2 * wanted
    model.weight.data.to_local().mul_(2)
    assert run(x).sum().item() == 4 * wanted
    with torch.inference_mode():
        assert not any(value.requires_grad for value in model.state_dict().values())
        model.weight.data.mul_(0.25)
    assert run(x).sum().item() == wanted


@pytest.mark.parametrize("stage", [1, 3])
def test_writes_to_a_state_dict_are_seen(stage: int, tmp_path: str) -> None:
    run_ranks(2, _loaded, stage, str(tmp_path))


def _began_alone(stage: int) -> list[Tensor]:
    """Gradients of a backward before the first compiled forward."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1.0 + dist.get_rank())
    zerofx.shard(model, config(stage))
    grads = [full(param.grad).clone() for param in model.parameters()]
    optimizer.step()
    locals_ = [full(param) for param in model.parameters()]
    return [*grads, *locals_]


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_from_before_become_means(stage: int) -> None:
    zero, one = run_ranks(2, _began_alone, stage)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(zero, one, strict=True))
    for grad in zero[: len(zero) // 2]:
        assert (grad == 1.5).all()


def _parts() -> list[str]:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    zerofx.shard(model, config(1))
    for part in (model[0], model[0], model):
        zerofx.shard(part, config(1))
    with zerofx.unshard(model) as values:
        return list(values)


def test_sharding_a_part_again_loses_nothing() -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert run_ranks(2, _parts) == [names] * 2


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(8, 8, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def _again() -> torch.dtype:
    """Sharding fails, as nothing says what the parameter is, and succeeds with other dtypes."""
    model = _Own()
    with pytest.raises(UnsupportedError, match="nothing says"):
        zerofx.shard(model, config(3, param_dtype=torch.float16, output_dtype=torch.float16))
    model.w = nn.Parameter(torch.randn(8, 8))
    zerofx.shard(model, config(3, param_dtype=torch.bfloat16, output_dtype=torch.float32))
    return model(torch.randn(4, 8)).dtype


def test_a_failed_attempt_leaves_no_casts_behind() -> None:
    assert run_ranks(2, _again) == [torch.float32] * 2


def _replaced(stage: int) -> int:
    """States that are left of eight, six of which were replaced."""
    model = zerofx.shard(net(lambda: nn.Linear(7, 13)), config(stage))
    run = torch.compile(model, backend=f"zero{stage}")
    session = session_of(model)
    assert session is not None
    alive = []
    for _ in range(3):
        run(torch.ones(2, 7)).sum().backward()
        alive += [weakref.ref(state) for state in session.states]
        values = {name: full(value) for name, value in model.state_dict().items()}
        model.load_state_dict(values, assign=True)
    run(torch.ones(2, 7))
    alive += [weakref.ref(state) for state in session.states]
    torch.compiler.reset()
    gc.collect()
    return sum(each() is not None for each in alive)


def _moved(stage: int) -> list[int]:
    """Bytes of all parameters and their buffers, before and after `.to()`."""
    model = zerofx.shard(net(lambda: nn.Linear(256, 256)), config(stage))
    session, held = session_of(model), []
    assert session is not None
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)(torch.ones(2, 256, dtype=dtype)).sum().backward()
        memory = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for state in session.states
            for each in (state.shard, state.buffer)
            if each is not None
        }
        held.append(sum(memory.values()))
    return held


def test_a_model_in_another_dtype_takes_its_memory_only() -> None:
    for before, after in run_ranks(2, _moved, 3):
        assert 2 * after == before


@pytest.mark.parametrize("stage", [1, 3])
def test_replaced_parameters_are_freed(stage: int) -> None:
    assert run_ranks(2, _replaced, stage) == [2, 2]


def _unpickled_alone() -> float:
    """Rank 0 looks at a pickle; models that all ranks make later meet nevertheless."""
    pickled = pickle.dumps(zerofx.shard(nn.Linear(7, 7), config(3)))
    if dist.get_rank() == 0:
        pickle.loads(pickled)
    model = zerofx.shard(nn.Linear(7, 7), config(3))
    model(torch.ones(2, 7)).sum().backward()
    return full(model.weight.grad).sum().item()


def test_one_rank_may_unpickle_a_model() -> None:
    assert run_ranks(2, _unpickled_alone) == [98.0] * 2
