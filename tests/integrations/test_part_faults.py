"""`TensorParallel` by hand: what a loop may do otherwise than the one that the docs show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import zerofx
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx.errors import ConfigError, DivergedError, ShardingError
from zerofx.integrations.tensor_parallel import TensorParallel, export_joined
from zerofx.integrations.tensor_parallel import parts as parts_module
from zerofx.integrations.tensor_parallel.rules import rules_of

SPECS: list[dict[str, Any]] = [
    {"patterns": ["up"], "partition_type": "column"},
    {"patterns": ["down"], "partition_type": "row"},
]


class Net(nn.Module):
    """Two layers that are cut, and one that is whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.head(x + self.down(torch.tanh(self.up(x))))).sum()


def _data(seed: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _divided(parts: TensorParallel | None = None) -> tuple[Any, TensorParallel, Any]:
    model, parts = Net().double(), parts or TensorParallel(2, rules_of(SPECS))
    parts.parallelize(model)
    torch._dynamo.reset()
    options = {"mesh": parts.mesh["data"], "inner": "eager", "min_shard_numel": 0}
    return model, parts, torch.compile(model, backend="zero3", options=options)


def test_the_mesh_of_a_process_group_whose_backend_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts_module, "init_device_mesh", lambda kind, *_, **__: kind)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert TensorParallel(1).mesh == "cpu"
        monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")  # with GPUs
        assert TensorParallel(1).mesh == "cuda"
    finally:
        dist.destroy_process_group()


def _clipped() -> list[float]:
    """Norms of the whole, and what is left of it."""
    model, parts, run = _divided()
    run(_data()).backward()
    found = [parts.clip_grad_norm_(model.parameters(), 0.5)]
    found.append(parts.clip_grad_norm_(list(model.parameters()), 9e9))
    found.append(parts.clip_grad_norm_(model.up.weight, 9e9))
    model.zero_grad()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    run(_data()).backward()
    found.append(parts.clip_grad_norm_(model.parameters(), 9e9))
    return [float(norm) for norm in found]


def test_norms_are_those_of_the_whole() -> None:
    """Of a generator, of one tensor, and after parameters are assigned."""
    alone = Net().double()
    alone(_data()).backward()
    norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
    assert norm > 0.5 and alone.up.weight.grad is not None
    for found in run_ranks(2, _clipped):
        want = [norm, 0.5, float(alone.up.weight.grad.norm()), norm]
        assert found == pytest.approx(want, rel=1e-6)


def _exported(folder: Path) -> None:
    model, parts = Net(), TensorParallel(2, rules_of(SPECS))
    parts.parallelize(model)
    export_joined(model, folder, parts)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_is_exported_before_it_is_sharded(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(num_ranks, _exported, tmp_path / "whole", timeout=30)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert whole.keys() == Net().state_dict().keys()
    for name, want in Net().state_dict().items():
        assert torch.equal(whole[name], want)


def _other_samples() -> None:
    model, parts, run = _divided()
    for factor in (torch.inf, 1.0):
        (run(_data(dist.get_rank())) * factor).backward()
        if factor == 1.0:
            with pytest.raises(DivergedError, match="same samples"):
                parts.complete_gradients(model.parameters())
        else:
            parts.complete_gradients(model.parameters())
        model.zero_grad()
    run(_data()).backward()
    parts.complete_gradients(model.parameters())
    model, _, run = _divided(parts)
    run(_data(dist.get_rank())).backward()
    with pytest.raises(DivergedError, match="same samples"):
        parts.complete_gradients(model.parameters())


def test_other_samples_are_found_after_an_overflow_and_in_a_second_model() -> None:
    run_ranks(2, _other_samples)


def _misused() -> None:
    model, parts, run = _divided()
    optimizer = zerofx.OwnerOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    run(_data()).backward()
    with refused("up.weight", "whole matrices", "element by element", kind=ShardingError):
        optimizer.step()
    for each in (model, _twice()):
        with refused("divided already", kind=ConfigError):
            parts.parallelize(each)
    odd: Any = Net()
    odd.hidden_size = 7
    with refused("hidden_size 7", kind=ConfigError):
        parts.parallelize(odd)
    half, plain = _twice(), Net()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (each.down(torch.tanh(each.up(torch.ones(4, 6)))) for each in (half, plain))
    assert ours.dtype is theirs.dtype is torch.bfloat16


def _twice() -> Any:
    model = Net()
    TensorParallel(2, rules_of(SPECS)).parallelize(model)
    return model


def test_misuse_is_refused_by_name() -> None:
    run_ranks(2, _misused)


def test_sizes_and_rules_that_mean_nothing() -> None:
    for size in (0, -1):
        with refused(f"{size} ranks cannot share", kind=ConfigError):
            TensorParallel(size)
    for spec, said in (
        ({"patterns": ["("]}, "missing )"),
        ({"patterns": ["up"], "gather_output": True, "partition_type": "row"}, "'column'"),
        ({"patterns": ["up"], "grad_allreduce": True}, "'skip'"),
    ):
        with refused(said, kind=ConfigError):
            rules_of([spec])
    assert rules_of([{"patterns": ["up"], "model_types": "Llama"}])[0].models == ("llama",)
