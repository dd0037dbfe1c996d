"""What single keys of a `ds_config.json` do to a training run."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.integrations.examples import BASE, nested
from tests.integrations.loops import full
from tests.ranks import run_ranks
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.frontend.layouts import describe_params, lay_out
from zerofx.integrations.deepspeed.recipe import Recipe

_ADAM = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01, "bias_correction": False}}
_BOTH = {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}


def _recipe(flat: dict[str, Any], **how: Any) -> Recipe:
    return zerofx.from_deepspeed(nested({**BASE, **flat}), **how)


class _Model(nn.Module):
    """Parameters of 64, 16, 16, 4 and 1 elements, and two buffers."""

    table: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(4, 16)
        self.narrow = nn.Linear(16, 1, bias=False)
        self.shift = nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.linspace(0, 1, 4))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x * self.table.to(x.dtype) + self.shift)) * self.scale


def _by_hand(steps: list[Tensor], value: Tensor) -> Tensor:
    """AdamW without bias correction, in fp64."""
    value, first, second = value.double(), torch.zeros(()), torch.zeros(())
    for grad in map(Tensor.double, steps):
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad * grad
        value = value * (1 - 0.1 * 0.01) - 0.1 * first / (second.sqrt() + 1e-8)
    return value


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}])
def test_adam_without_bias_correction(how: dict[str, bool]) -> None:
    recipe = _recipe({"optimizer": {**_ADAM, "params": {**_ADAM["params"], **how}}})
    start, idle = torch.randn(5), nn.Parameter(torch.zeros(2))
    param = nn.Parameter(start.clone())
    optimizer = recipe.make_optimizer([param, idle])
    grads = [torch.randn(5) for _ in range(4)]
    for number, grad in enumerate(grads):
        if number == 2:  # it goes on after a checkpoint, whose steps may have been corrected
            state = copy.deepcopy(optimizer.state_dict())
            state["state"][0]["step"] = torch.tensor(2.0)
            optimizer = recipe.make_optimizer([param, idle])
            optimizer.load_state_dict(state)
        param.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(
        param.detach().double(), _by_hand(grads, start), rtol=1e-5, atol=1e-6
    )
    assert idle not in optimizer.state


def test_only_adam_corrects_bias() -> None:
    with pytest.raises(ConfigError, match="bias_correction"):
        _recipe({"optimizer": {"type": "SGD", "params": {"bias_correction": False}}})


def _train(recipe: Recipe, model: nn.Module, dtype: torch.dtype) -> Any:
    """Three steps; the optimizer."""
    recipe.cast_model(model)
    zerofx.shard(model, recipe.config)
    run: Any = torch.compile(model, backend=recipe.backend, options=recipe.options)
    optimizer, scaler = recipe.make_optimizer(model.parameters()), recipe.make_scaler("cpu")
    for step in range(3):
        x = torch.linspace(-1, 1, 8, dtype=dtype).view(2, 4) * (step + 1)
        recipe.backward(run(x).square().sum(), scaler)
        recipe.step(optimizer, scaler)
    return optimizer


_UNCORRECTED = {"optimizer": _ADAM, "gradient_clipping": 0.0, "zero_optimization.stage": 3}


def _uncorrected() -> list[Tensor]:
    recipe, model = _recipe(_UNCORRECTED, inner="eager", min_shard_numel=8), _Model()
    optimizer = _train(recipe, model, torch.float32)
    assert all(state["step"].isinf() for state in optimizer.state.values())
    return [full(param) for param in model.parameters()]


def test_adam_without_bias_correction_over_shards() -> None:
    twin = _Model()
    optimizer = _recipe(_UNCORRECTED, world_size=1).make_optimizer(twin.parameters())
    for step in range(3):
        x = torch.linspace(-1, 1, 8).view(2, 4) * (step + 1)
        twin(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for params in run_ranks(2, _uncorrected):
        for ours, theirs in zip(params, twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_parameters_and_states_in_bf16() -> None:
    run_ranks(2, _all_in_bf16)


def _all_in_bf16() -> None:
    flat = {"optimizer.type": "AdamW", "bf16.enabled": True, **_BOTH, "zero_optimization.stage": 3}
    recipe = _recipe(flat, inner="eager", min_shard_numel=8)
    model = _Model()
    optimizer = _train(recipe, model, torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    states = optimizer.state.values()
    assert {state["exp_avg"].dtype for state in states} == {torch.bfloat16}
    assert model.table.dtype is torch.float32, "buffers are another key's"
    with pytest.raises(ConfigError, match=r"wide\.weight[\s\S]*cast_model"):
        uncast = _Model()
        zerofx.shard(uncast, recipe.config)
        recipe.step(recipe.make_optimizer(uncast.parameters()), recipe.make_scaler("cpu"))


def _trainer_in_bf16(folder: str) -> None:
    pytest.importorskip("accelerate")
    from tests.integrations.test_trainer import FILE, trainer_of

    asked = zerofx.from_deepspeed(
        {**FILE, **nested({"bf16.enabled": True, **_BOTH})}, inner="eager", min_shard_numel=8
    )
    trainer = trainer_of(2, folder, max_steps=1, save_strategy="no", zero=asked)
    trainer.train()
    assert {param.dtype for param in trainer.model.parameters()} == {torch.bfloat16}


def test_a_trainer_casts_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, _trainer_in_bf16, str(tmp_path), timeout=200)


def test_weights_in_16_bits_without_their_states() -> None:
    weights, states = _BOTH
    with pytest.raises(UnsupportedError, match="offloading"):
        _recipe({"bf16.enabled": True, weights: True})
    with pytest.raises(ConfigError, match="needs"):
        _recipe({"bf16.enabled": True, states: True})
    assert _recipe({"bf16.enabled": True, **_BOTH}).casts.params is torch.bfloat16
    assert _recipe({"bf16.enabled": True, **dict.fromkeys(_BOTH, False)}).casts.params is None


class _Listed(nn.Module):
    """Names a buffer, as transformers' models do; another one lies outside."""

    _keep_in_fp32_modules_strict = ("table",)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = _Model()
        self.register_buffer("far", torch.zeros(2))
        self.to(dtype)


@pytest.mark.parametrize(
    ("flat", "table", "far"),
    [
        ({}, torch.float16, torch.float16),
        ({"data_types.buffer_dtype": "bf16"}, torch.bfloat16, torch.bfloat16),
        ({"bf16.enabled": True}, torch.float32, torch.float16),
        ({"bf16.enabled": True, "data_types.buffer_dtype": "bf16"}, torch.float32, torch.bfloat16),
        ({"bf16.enabled": True, "data_types.keep_in_fp32_modules": []}, *[torch.float16] * 2),
        (
            {"bf16.enabled": True, "data_types.keep_in_fp32_modules": ["f*r"]},
            torch.float16,
            torch.float32,
        ),
    ],
)
def test_buffers(flat: dict[str, Any], table: torch.dtype, far: torch.dtype) -> None:
    model = _Listed(torch.float16)
    before = list(model.buffers())
    _recipe(flat).cast_model(model)
    assert (model.inner.table.dtype, model.far.dtype) == (table, far)
    assert model.inner.count.dtype is torch.int64
    assert {param.dtype for param in model.parameters()} == {torch.float16}
    assert all(a is b for a, b in zip(before, model.buffers(), strict=True))


def test_names_of_dtypes_must_agree() -> None:
    name = "data_types.param_dtype"
    with pytest.raises(ConfigError, match=name):
        _recipe({name: "bf16"})
    with pytest.raises(ConfigError, match=name):
        _recipe({name: "fp32", "fp16.enabled": True})
    assert _recipe({name: "fp32"}).config.param_dtype is None
    assert _recipe({name: "half", "fp16.enabled": True}).config.param_dtype is torch.float16
    with pytest.raises(ConfigError, match="keep_in_fp32_modules"):
        _recipe({"data_types.keep_in_fp32_modules": "norm"})


def _replicated(bound: int) -> dict[str, int]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 20}
    zero |= {"stage3_model_persistence_threshold": bound}
    recipe = _recipe({"optimizer.type": "AdamW", "zero_optimization": zero}, inner="eager")
    model = _Model()
    laid = lay_out(describe_params(model), recipe.config, 2)
    _train(recipe, model, torch.float32)
    found: dict[str, int] = {}
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = {n: full(p).numel() for n, p in copied.named_parameters() if _is_whole(p)}
        assert sum(found.values()) <= max(bound, 1)
    assert found.keys() == {spec.name for spec in laid if not spec.layout.sharded}, "as predicted"
    return found


def _is_whole(param: Any) -> bool:
    return all(each.is_replicate() for each in param.placements)


@pytest.mark.parametrize(
    ("bound", "names"),
    [
        (37, ["narrow.weight", "scale", "shift", "wide.bias"]),
        (36, ["scale", "shift"]),
        (5, ["scale", "shift"]),
        (0, ["scale"]),
    ],
)
def test_the_largest_replicated_parameters_are_sharded_first(bound: int, names: list[str]) -> None:
    """Of 64, 16, 16, 4 and 1 elements, those of at most 20 stay whole; scalars always do."""
    for found in run_ranks(2, _replicated, bound):
        assert sorted(found) == names


@pytest.mark.parametrize(
    "off",
    [
        {"tensor_parallel": {"autotp_size": 1}},
        {"compression_training": {"layer_reduction": {"enabled": False}, "row_pruning": {}}},
    ],
)
def test_sections_in_which_all_is_off(off: dict[str, Any]) -> None:
    zerofx.from_deepspeed({"train_batch_size": 8, **off}, world_size=1)


def test_parameters_of_other_optimizers_are_named() -> None:
    mixed = {"type": "AdamW", "params": {"max_coeff": 0.3}}
    with pytest.raises(UnsupportedError, match="max_coeff: Lamb"):
        zerofx.from_deepspeed({"train_batch_size": 8, "optimizer": mixed}, world_size=1)
