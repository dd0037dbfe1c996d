"""A mesh of some ranks: their model concerns nobody else, whatever other ranks do meanwhile.

So zerofx shards over the data-parallel axis of a larger mesh, along whose other axes the model
itself communicates, by torch's functional collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.contract.loops import full
from tests.ranks import RanksFailed, run_ranks
from zerofx import checkpoint

WIDTH, HEADS, LENGTH, CLASSES, STEPS = 16, 4, 8, 7, 4


class Attention(nn.Module):
    """Ulysses: between the projections each rank has all positions of some heads."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.heads(x).view(rows, length, 3, HEADS, WIDTH // HEADS).unbind(2)
        query, key, value = (self._turn(part, 2, 1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return self.out(self._turn(mixed, 1, 2).reshape(rows, length, WIDTH))

    def _turn(self, x: Tensor, split: int, join: int) -> Tensor:
        if self.group is None:
            return x
        parts = torch.stack(x.chunk(self.group.size(), split))
        parts = funcol.all_to_all_single_autograd(parts, None, None, self.group)
        return torch.cat(parts.unbind(), join)


class Mlp(nn.Module):
    """Megatron: columns of the first matrix and rows of the second are split over ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        inner = 4 * WIDTH // (1 if group is None else group.size())
        self.up = nn.Linear(WIDTH, inner, dtype=torch.float64)
        self.down = nn.Linear(inner, WIDTH, bias=False, dtype=torch.float64)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return self.down(F.gelu(self.up(x)))
        inner = F.gelu(self.up(_SumBackward.apply(x, self.group)))
        return _SumForward.apply(self.down(inner), self.group)


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return funcol.wait_tensor(funcol.all_reduce(grad, "sum", ctx.group)), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad, None


class Net(nn.Module):
    """Two residual blocks and a head; the loss is the mean over this rank's positions."""

    def __init__(self, block: Callable[[Any], nn.Module], group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(group) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    """Embeddings of sequences, and classes of their positions."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (rows, LENGTH), generator=generator)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


def _compiled(model: nn.Module, stage: int, mesh: DeviceMesh | None, inner: str) -> Any:
    options = {"min_shard_numel": 0, "inner": inner, "mesh": mesh}
    return torch.compile(model, backend=f"zero{stage}", options=options)


def _steps(
    run: Callable[..., Tensor],
    params: Iterable[nn.Parameter],
    inputs: Callable[[int], Any],
    steps: int = STEPS,
) -> list[float]:
    optimizer, losses = torch.optim.SGD(params, lr=0.3, momentum=0.9), []
    for step in range(steps):
        loss = run(*inputs(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _alone(block: Callable[[Any], nn.Module], rows: int) -> tuple[list[float], nn.Module]:
    model = Net(block)
    return _steps(model, model.parameters(), lambda step: batch(rows, step)), model


def _sequence_parallel(stage: int, inner: str) -> tuple[list[float], dict[str, Tensor]]:
    mesh = _mesh()
    data, part = mesh.get_local_rank("data"), mesh.get_local_rank("model")
    model = Net(Attention, mesh.get_group("model"))

    def inputs(step: int) -> Any:
        whole = batch(4, step)
        return [each.chunk(2)[data].chunk(2, 1)[part].contiguous() for each in whole]

    losses = _steps(_compiled(model, stage, None, inner), model.parameters(), inputs)
    return losses, {name: full(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("stage", "inner"), [(1, "eager"), (3, "eager")])
def test_sequence_parallel(stage: int, inner: str) -> None:
    """Every rank trains on its half of the positions; gradients are the mean over all ranks."""
    results = run_ranks(4, _sequence_parallel, stage, inner, timeout=120)
    losses, model = _alone(Attention, 4)
    mean = torch.tensor([each for each, _ in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-6, atol=0)
    for _, params in results:
        for name, want in model.named_parameters():
            torch.testing.assert_close(params[name], want.detach(), rtol=1e-10, atol=1e-12)


def _slices(whole: nn.Module, part: int) -> dict[str, Tensor]:
    """What one of two tensor-parallel ranks holds of a model."""
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    found = {}
    for name, value in whole.state_dict().items():
        dim = next((dim for end, dim in dims.items() if name.endswith(end)), None)
        found[name] = value if dim is None else value.chunk(2, dim)[part].contiguous()
    return found


def _tensor_parallel(stage: int, inner: str, folder: Path) -> tuple[int, list[float], Any]:
    mesh = _mesh()
    data, part = mesh.get_local_rank("data"), mesh.get_local_rank("model")
    model = Net(Mlp, mesh.get_group("model"))
    model.load_state_dict(_slices(Net(Mlp), part))
    run = _compiled(model, stage, mesh["data"], inner)
    losses = _steps(
        run, model.parameters(), lambda step: [each.chunk(2)[data] for each in batch(4, step)]
    )
    values = {name: full(p).clone() for name, p in model.named_parameters()}
    _saved_and_loaded(model, folder, part, values)
    return part, losses, values


def _saved_and_loaded(model: nn.Module, folder: Path, part: int, values: dict[str, Tensor]) -> None:
    mine = folder / f"part{part}"
    checkpoint.save(mine, model, extra=part)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert checkpoint.load(mine, model) == part
    checkpoint.async_save(mine, model, extra=part).wait()
    assert checkpoint.load(mine, model) == part
    for name, param in model.named_parameters():
        assert torch.equal(full(param), values[name]), name
    whole = checkpoint.full_state_dict(model)
    assert sorted(whole) == (sorted(values) if dist.get_rank() < 2 else [])
    assert all(torch.equal(whole[name], values[name]) for name in whole)
    checkpoint.export_safetensors(model, folder / f"weights{part}")


@pytest.mark.parametrize(("stage", "inner"), [(2, "eager"), (3, "inductor")])
def test_tensor_parallel(stage: int, inner: str, tmp_path: Path) -> None:
    """Each part of the model is sharded, saved and loaded by the ranks that hold it."""
    results = run_ranks(4, _tensor_parallel, stage, inner, tmp_path, timeout=120)
    losses, model = _alone(Mlp, 4)
    mean = torch.tensor([each for _, each, _ in results]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-6, atol=0)
    for part, _, params in results:
        for name, want in _slices(model, part).items():
            torch.testing.assert_close(params[name], want, rtol=1e-10, atol=1e-12)


def _one_path(folder: Path) -> None:
    mesh = _mesh()
    model = nn.Linear(4, 4)
    _compiled(model, 3, mesh["data"], "eager")(torch.ones(1, 4)).sum().backward()
    if mesh.get_local_rank("model"):
        dist.barrier()
    checkpoint.save(folder / "model", model)
    if not mesh.get_local_rank("model"):
        dist.barrier()


def test_two_models_are_not_saved_as_one(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"ranks 1, 3 save to .*, where ranks 0, 2 have saved"):
        run_ranks(4, _one_path, tmp_path)


def _own_model(number: int) -> nn.Module:
    torch.manual_seed(number)
    widths = (8, 24, 24, 8) if number else (8, 16, 8)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))


def _own_steps(run: Any, model: nn.Module, number: int, rows: slice) -> list[float]:
    """One model takes three steps, the other five; losses of the same rows in each."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))[rows]
    return _steps(
        lambda x: run(x).square().mean(), model.parameters(), lambda _: (x,), 3 + 2 * number
    )


def _own_models(folder: Path, stage: str) -> list[float]:
    """Ranks 0 and 1 train one model, 2 and 3 another; then all hold a third."""
    mesh = _mesh()["model"]
    number, half = divmod(dist.get_rank(), 2)
    model = _own_model(number)
    options = {"min_shard_numel": 0, "inner": "eager", "mesh": mesh, "dump": str(folder)}
    run = torch.compile(model, backend=stage, options=options)
    losses = _own_steps(run, model, number, slice(2 * half, 2 * half + 2))
    both = nn.Linear(8, 8)
    torch.compile(both, backend="zero3", options={"inner": "eager"})(torch.ones(1, 8))
    return losses


@pytest.mark.parametrize("stage", ["zero3", "zero"])
def test_ranks_train_different_models(stage: str, tmp_path: Path) -> None:
    losses = [torch.tensor(each) for each in run_ranks(4, _own_models, tmp_path, stage)]
    for number in (0, 1):
        model = _own_model(number)
        want = torch.tensor(_own_steps(model, model, number, slice(4)))
        mean = (losses[2 * number] + losses[2 * number + 1]) / 2
        torch.testing.assert_close(mean, want, rtol=1e-6, atol=0)
    # The first rank of each model writes its programs.
    graphs = [path.parent.relative_to(tmp_path) for path in tmp_path.rglob("report.json")]
    assert sorted(str(graph).rpartition("graph")[0] for graph in graphs) == ["", "rank2/"]


def _elsewhere() -> None:
    mesh = DeviceMesh("cpu", [0])
    _compiled(nn.Linear(4, 4), 3, mesh, "eager")(torch.ones(1, 4))


def test_a_rank_outside_the_mesh_is_told() -> None:
    with pytest.raises(RanksFailed, match="rank 1 runs a model of the mesh of ranks 0"):
        run_ranks(2, _elsewhere)
