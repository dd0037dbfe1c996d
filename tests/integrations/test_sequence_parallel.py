"""A file of DeepSpeed with `sequence_parallel_size` trains as one process on whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests.hard.test_meshes import Attention, Net, batch
from tests.integrations.examples import BASE, nested
from tests.ranks import run_ranks
from tests.sequence.models import Gpt
from tests.sequence.models import batch as tokens
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.deepspeed.recipe import Recipe

KEYS = {
    "train_micro_batch_size_per_gpu": 2,
    "sequence_parallel_size": 2,
    "gradient_clipping": 0.5,
    "optimizer.type": "SGD",
    "optimizer.params.lr": 0.5,
    "zero_optimization.stage": 3,
    "zero_optimization.stage3_param_persistence_threshold": 0,
    "seq_parallel_communication_data_type": "fp32",
}


def _translate(**keys: Any) -> Recipe:
    return zerofx.from_deepspeed(nested({**BASE, **keys}), world_size=4)


def _trained(steps: int) -> dict[str, Tensor]:
    """As DeepSpeed has it: the losses of the ranks that share a sequence add up to its own."""
    data, part = divmod(dist.get_rank(), 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    recipe = zerofx.from_deepspeed(nested(KEYS), inner="eager")
    model = Net(Attention, mesh.get_group("sequence")).float()
    run = torch.compile(model, backend=recipe.backend, options=recipe.options)
    optimizer, scaler = recipe.make_optimizer(model.parameters()), recipe.make_scaler("cpu")
    for step in range(steps):
        x, y = (each.chunk(2)[data].chunk(2, 1)[part] for each in batch(4, step))
        loss = run(x.float().contiguous(), y.contiguous()) / recipe.batch.sharing
        recipe.backward(loss, scaler)
        recipe.step(optimizer, scaler)
    with zerofx.unshard(model) as values:
        return {name: value.detach().clone() for name, value in values.items()}


def test_ranks_that_share_sequences_train_as_one_process() -> None:
    model = Net(Attention).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        x, y = batch(4, step)
        model(x.float(), y).backward()
        # Clipping tells sums of gradients from means.
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        optimizer.step()
        optimizer.zero_grad()
    for got in run_ranks(4, _trained, 3):
        for name, want in model.named_parameters():
            torch.testing.assert_close(got[name], want.detach(), rtol=1e-5, atol=1e-6)


def test_ranks_that_share_samples() -> None:
    """The batch counts them once; DeepSpeed reduces in fp32 there."""
    recipe = _translate(sequence_parallel_size=2, data_parallel_size=2)
    assert (recipe.batch.train, recipe.batch.groups, recipe.batch.sharing) == (4, 2, 2)
    assert recipe.config.reduce_dtype is torch.float32
    assert "batch: 4 = 2 (micro-batch) × 1 (accumulation) × 2 (times 2 ranks" in str(recipe)
    plain = _translate(seq_parallel_communication_data_type="bf16")
    assert plain.config.reduce_dtype is None
    for sizes in ({"sequence_parallel_size": 3}, {"data_parallel_size": 2}):
        with pytest.raises(ConfigError, match="sequence_parallel_size"):
            _translate(**sizes)


AUTOSP = {**KEYS, "compile.deepcompile": True, "compile.passes": ["autosp"]}


def _cut(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Every rank of a sequence is given the whole of it, and has the whole loss."""
    recipe = zerofx.from_deepspeed(nested(AUTOSP), inner="eager")
    assert recipe.config.sequence_parallel == 2
    model = Gpt(depth=1).float()
    run = torch.compile(model, backend=recipe.backend, options=recipe.options)
    optimizer, scaler = recipe.make_optimizer(model.parameters()), recipe.make_scaler("cpu")
    losses: list[float] = []
    for step in range(steps):
        ids, labels = (each.chunk(2)[recipe.batch.place()].clone() for each in tokens(step))
        zerofx.mark_sequence(ids)
        loss, _ = run(ids, labels)
        recipe.backward(loss, scaler)
        recipe.step(optimizer, scaler)
        losses.append(loss.item())
    with zerofx.unshard(model) as values:
        return losses, {name: value.detach().clone() for name, value in values.items()}


def test_a_file_with_autosp_trains_as_one_process() -> None:
    model, want = Gpt(depth=1).float(), list[list[float]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        rows = zip(*(each.chunk(2) for each in tokens(step)), strict=True)
        losses = [model(*row)[0] for row in rows]
        (sum(losses) / 2).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        optimizer.step()
        optimizer.zero_grad()
        want.append([loss.item() for loss in losses])
    for rank, (got, values) in enumerate(run_ranks(4, _cut, 3)):
        assert got == pytest.approx([each[rank // 2] for each in want], rel=1e-5)
        for name, param in model.named_parameters():
            torch.testing.assert_close(values[name], param.detach(), rtol=1e-5, atol=1e-6)


def test_autosp_goes_by_sequence_parallel_size() -> None:
    """Without it DeepSpeed divides sequences among one rank."""
    passes = {"compile.passes": ["autosp"]}
    assert _translate(**passes).config.sequence_parallel == 1
    recipe = _translate(**passes, sequence_parallel_size=4)
    assert (recipe.config.sequence_parallel, recipe.batch.groups) == (4, 1)
    both = {"tensor_parallel.autotp_size": 2, "sequence_parallel_size": 2}
    with pytest.raises(UnsupportedError, match="autotp_size"):
        _translate(**passes, **both)
