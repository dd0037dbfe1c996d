"""A curriculum and random-LTD together: two ranks train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import zerofx
from tests.integrations.data_files import ROUTED, metric, write_index
from tests.integrations.examples import BASE, nested
from tests.ranks import run_ranks
from zerofx.integrations.deepspeed.data_keys import RANDOM_LTD, SAMPLING
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.routing import TokenRouter

LENGTH, TOKENS, STEPS = 48, 20, 4


def _recipe(files: dict[str, str]) -> Recipe:
    flat = {
        **BASE,
        **ROUTED,
        f"{RANDOM_LTD}.total_layer_num": 2,
        f"{RANDOM_LTD}.random_ltd_schedule.schedule_config.require_steps": 3,
        **metric("ease", **files),
        f"{SAMPLING}.num_epochs": 3,
        "gradient_accumulation_steps": 2,
        "optimizer.type": "AdamW",
        "optimizer.params.lr": 3e-3,
        "zero_optimization.stage": 3,
        "zero_optimization.stage3_param_persistence_threshold": 0,
    }
    return zerofx.from_deepspeed(nested(flat), world_size=2, inner="eager")


def _sequences() -> Tensor:
    return torch.randint(64, (LENGTH, TOKENS), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Attention: what tokens become depends on which others are there, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Gpt(nn.Module):
    """A language model of two blocks; its embeddings are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.through(block, x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Checkpointed(Gpt):
    """Runs its blocks once more in backward."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class _Run:
    """A model with its tokens and batches, of one place."""

    def __init__(self, recipe: Recipe, kind: type[Gpt], place: int) -> None:
        torch.manual_seed(0)
        self.model = kind()
        router = recipe.route_tokens(self.model, Block, place=place)
        assert router is not None
        self.router: TokenRouter = router
        self.sampler = recipe.make_sampler(LENGTH, place=place)
        data: Any = _sequences()
        self.loader = DataLoader(data, batch_sampler=self.sampler, **recipe.loader)


def _of_two_ranks(files: dict[str, str]) -> tuple[list[float], dict[str, Tensor], int]:
    """Trains half of the steps, then goes on with another sampler and router."""
    recipe = _recipe(files)
    run = _Run(recipe, Checkpointed, dist.get_rank())
    before = counters["stats"]["unique_graphs"]
    compiled = torch.compile(run.model, backend=recipe.backend, options=recipe.options)
    optimizer, scaler = recipe.make_optimizer(run.model.parameters()), recipe.make_scaler("cpu")
    losses: list[float] = []
    batches = iter(run.loader)
    for step in range(STEPS):
        if step == STEPS // 2:
            sampler_state, state = run.sampler.state_dict(), run.router.state_dict()
            run.sampler.load_state_dict(sampler_state)
            run.router.step()
            run.router.load_state_dict(state)
            batches = iter(run.loader)
        for _ in range(recipe.batch.accumulation):
            loss = compiled(next(batches))
            losses.append(loss.item())
            recipe.backward(loss, scaler, run.router)
        recipe.step(optimizer, scaler, router=run.router)
    with zerofx.unshard(run.model) as values:
        full = {name: value.detach().clone() for name, value in values.items()}
    return losses, full, counters["stats"]["unique_graphs"] - before


def _of_one_process(files: dict[str, str]) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Both ranks' samples through two models, whose gradients are added up by hand."""
    recipe = _recipe(files)
    runs = [_Run(recipe, Gpt, place) for place in range(2)]
    first, second = (run.model for run in runs)
    optimizer = recipe.make_optimizer(first.parameters())
    batches = [iter(run.loader) for run in runs]
    losses: list[list[float]] = [[], []]
    for _ in range(STEPS):
        for _ in range(2):
            for place, run in enumerate(runs):
                loss = run.model(next(batches[place]))
                losses[place].append(loss.item())
                (loss / 4).backward()
                run.router.advance()
        for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            ours.grad += theirs.grad
        nn.utils.clip_grad_norm_(first.parameters(), 1.0)
        optimizer.step()
        second.load_state_dict(first.state_dict())
        for run in runs:
            run.model.zero_grad()
            run.router.step()
    return losses, dict(first.named_parameters())


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    files = write_index(tmp_path, "ease", [7 * sample % 10 + 1 for sample in range(LENGTH)])
    losses, want = _of_one_process(files)
    got = run_ranks(2, _of_two_ranks, files, timeout=200)
    for place, (found, values, graphs) in enumerate(got):
        assert found == pytest.approx(losses[place], rel=1e-4)
        assert graphs <= 2, "one for 4 tokens, one for 8, 12 and 16"
        for name, value in want.items():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-3, atol=1e-5)
