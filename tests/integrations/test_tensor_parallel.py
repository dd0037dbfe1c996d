"""A file with `tensor_parallel`: ranks that hold parts of a model train as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import zerofx
from tests.integrations import test_part_faults
from tests.integrations.examples import BASE, nested
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import ConfigError, DivergedError, UnsupportedError
from zerofx.integrations.deepspeed.recipe import Recipe

WIDTH, HEADS, WORDS, STEPS = 16, 4, 32, 3
SPECS = [
    {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.norm_"], "partition_type": "skip", "grad_allreduce": True},
    {"patterns": ["head"], "gather_output": True},
]


class Block(nn.Module):
    """Attention with a fused matrix and norms of each head; a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm_q = nn.LayerNorm(WIDTH // HEADS)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(x).view(rows, length, 3, self.num_heads, WIDTH // HEADS).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(self.norm_q(query), key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    """Returns the loss of the next words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Qwen(nn.Module):
    """A model with a plan of its own, inside another: norms of heads, and fewer keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            head_dim=4,
        )
        self.inner: Any = transformers.Qwen3ForCausalLM(config)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.inner(input_ids=x).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def _recipe(stage: int = 3, **keys: Any) -> Recipe:
    flat = {
        **BASE,
        "tensor_parallel.autotp_size": 2,
        "optimizer.type": "SGD",
        "optimizer.params.lr": 0.5,
        "optimizer.params.momentum": 0.9,
        "gradient_clipping": 0.5,
        "zero_optimization.stage": stage,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
        **keys,
    }
    return zerofx.from_deepspeed(nested(flat), inner="eager", min_shard_numel=0)


def _by_specs(stage: int = 3, **keys: Any) -> Recipe:
    return _recipe(stage, **{"tensor_parallel.partition_config.layer_specs": SPECS, **keys})


def data(step: int) -> Tensor:
    """Sequences of words, for all groups of ranks that share a model."""
    return torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(step))


def _mine(recipe: Recipe, step: int) -> Tensor:
    assert recipe.tensor_parallel is not None
    mesh = recipe.tensor_parallel.mesh["data"]
    return data(step).chunk(mesh.size())[mesh.get_local_rank()]


def _compiled(recipe: Recipe, model: nn.Module) -> Any:
    recipe.parallelize(model)
    zerofx.shard(model, recipe.config)
    return torch.compile(model, backend=recipe.backend, options=recipe.options)


def _trained(folder: Path, build: Any, recipe: Recipe) -> list[float]:
    """Losses; ranks begin with values of their own, save in between, and write the whole."""
    model = build().double()
    with torch.no_grad():
        next(model.parameters()).add_(dist.get_rank())
    early = recipe.make_optimizer(model.parameters())
    run, scaler = _compiled(recipe, model), recipe.make_scaler("cpu")
    assert recipe.tensor_parallel is not None
    part, losses = folder / f"part{recipe.tensor_parallel.part}", []
    for step in range(STEPS):
        loss = run(_mine(recipe, step))
        recipe.backward(loss, scaler)
        recipe.step(early, scaler)
        losses.append(loss.item())
        if step == 0:
            checkpoint.save(part, model, early)
    recipe.save_model(model, folder / "whole")
    checkpoint.load(part, model, early)
    for step in range(1, STEPS):
        loss = run(_mine(recipe, step))
        assert abs(loss.item() - losses[step]) < 1e-12
        recipe.backward(loss, scaler)
        recipe.step(early, scaler)
    return losses


def alone(build: Any) -> tuple[Tensor, nn.Module]:
    """Losses of one process by step and half of the ranks, and its model."""
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        halves = [model(half) for half in data(step).chunk(2)]
        torch.stack(halves).mean().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        optimizer.step()
        optimizer.zero_grad()
        losses.append([half.item() for half in halves])
    return torch.tensor(losses), model


CASES: dict[str, tuple[int, Any, Any]] = {
    "rules": (4, Gpt, lambda: _by_specs(1)),
    "the plan of a model": (2, Qwen, _recipe),
}


def _case(name: str, folder: Path) -> list[float]:
    _, build, recipe = CASES[name]
    return _trained(folder, build, recipe())


@pytest.mark.parametrize("name", CASES)
def test_parts_train_as_one_process(name: str, tmp_path: Path) -> None:
    num_ranks, build, _ = CASES[name]
    found = run_ranks(num_ranks, _case, name, tmp_path)
    losses, model = alone(build)
    for rank, mine in enumerate(found):
        want = losses[:, rank // 2] if num_ranks == 4 else losses.mean(1)
        torch.testing.assert_close(torch.tensor(mine), want, rtol=1e-6, atol=0)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for key, want in model.named_parameters():
        torch.testing.assert_close(whole[key], want.detach(), rtol=1e-9, atol=1e-10)


def _faults() -> None:
    keys: Any = {"tensor_parallel.partition_config.layer_specs": test_part_faults.SPECS}
    recipe = _recipe(**keys, **{"bf16.enabled": True})
    model = test_part_faults.Net()
    run = _compiled(recipe, model)
    optimizer, scaler = recipe.make_optimizer(model.parameters()), recipe.make_scaler("cpu")

    def backward(seed: int) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        recipe.backward(run(x.bfloat16()), scaler)

    backward(dist.get_rank())
    with pytest.raises(DivergedError, match="same samples"):
        recipe.step(optimizer, scaler)
    model.zero_grad()
    backward(dist.get_rank() // 2)
    weight: Any = model.up.weight
    if dist.get_rank() == 1:
        weight.grad.to_local()[:1] = torch.inf
    assert not recipe.step(optimizer, scaler)  # one rank's overflow is every part's
    backward(dist.get_rank() // 2)
    assert recipe.step(optimizer, scaler)


def _missing() -> None:
    """A rule, and all of them."""
    own: Any = [spec for spec in SPECS if "grad_allreduce" not in spec]
    recipe = _recipe(**{"tensor_parallel.partition_config.layer_specs": own})
    model = Gpt()
    run, scaler = _compiled(recipe, model), recipe.make_scaler("cpu")
    recipe.backward(run(_mine(recipe, 0)), scaler)
    with pytest.raises(DivergedError, match=r"blocks\.0\.norm_q\.weight(.|\n)*grad_allreduce"):
        recipe.step(recipe.make_optimizer(model.parameters()), scaler)
    with pytest.raises(ConfigError, match="divided already"):
        recipe.parallelize(model)

    recipe, model = _by_specs(), Gpt()
    recipe.backward(model(data(0)), scaler)
    with pytest.raises(ConfigError, match="whole on each"):
        recipe.step(recipe.make_optimizer(model.parameters()), scaler)


def test_faults_are_found() -> None:
    run_ranks(4, _faults)
    run_ranks(2, _missing)


class Tied(Gpt):
    """The head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.words.weight


def _refused() -> None:
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (Gpt(), {"layer_specs": []}, ConfigError, "no tp_plan"),
        (Gpt(), {"layer_specs": [{"patterns": ["nothing"]}]}, ConfigError, "no rule fits"),
        (Gpt(), {"layer_specs": SPECS[:2], "strict_mode": True}, ConfigError, r"blocks\.0\.out"),
        (Gpt(), {"layer_specs": [{"patterns": ["words"]}]}, UnsupportedError, "Embedding"),
        (Tied(), {"layer_specs": [{"patterns": ["head"]}]}, ConfigError, "another module's"),
    ]
    for shape in ([5, -1], [[32, 8], -1]):
        spec = {"patterns": [r".*\.qkv\."], "shape": shape}
        cases.append((Gpt(), {"layer_specs": [spec]}, ConfigError, "shape"))
    few: Any = Gpt()
    few.blocks[0].num_heads = 3
    cases.append((few, {"layer_specs": SPECS}, ConfigError, "num_heads 3"))
    adapted: Any = Gpt()
    adapted.head.base_layer = nn.Linear(2, 2)
    cases.append((adapted, {"layer_specs": SPECS}, UnsupportedError, "adapters"))
    odd = nn.Sequential(nn.Linear(4, 5))
    cases.append((odd, {"layer_specs": [{"patterns": ["0"]}]}, ConfigError, "5 outputs"))
    for model, keys, error, match in cases:
        flat = {f"tensor_parallel.partition_config.{key}": value for key, value in keys.items()}
        with pytest.raises(error, match=match):
            _recipe(**flat).parallelize(model)
    tied = Tied()
    _by_specs().parallelize(tied)
    assert tied.head.out_features == WORDS  # whole, as its embedding is


def test_models_that_cannot_be_divided() -> None:
    run_ranks(2, _refused)


def test_files_that_contradict_themselves() -> None:
    parts = "tensor_parallel."
    for flat, match in (
        ({f"{parts}preset_model": "unknown"}, "preset_model"),
        ({f"{parts}tp.tp_size": 4}, "tp_size"),
        ({f"{parts}partition_config.layer_specs": [{"pattern": ["x"]}]}, "layer_spec"),
        ({"compile.passes": ["z1"]}, "stage 1 or 2"),
        ({"compile.passes": ["autotp"], f"{parts}autotp_size": 1}, "autotp_size"),
        ({"compile.passes": ["z2"]}, "z2"),
        ({f"{parts}autotp_size": 3}, "not 1 × 1 × 3"),
    ):
        with pytest.raises(ConfigError, match=match):
            zerofx.from_deepspeed(
                nested({**BASE, f"{parts}autotp_size": 2, "zero_optimization.stage": 3, **flat}),
                world_size=4,
            )
    flat = {**BASE, "tensor_parallel.autotp_size": 2, "compile.passes": ["autotp"]}
    recipe = zerofx.from_deepspeed(nested(flat), world_size=4)
    assert "batch: 4 = 2 (micro-batch) × 1 (accumulation) × 2 (times 2 ranks that" in str(recipe)
    with pytest.raises(ConfigError, match="process group"):
        _ = recipe.config
