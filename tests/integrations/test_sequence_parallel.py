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
from zerofx.errors import ConfigError
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
