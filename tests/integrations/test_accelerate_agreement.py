"""What an Accelerator is told by other ways than its arguments: by a model, plugins, variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zerofx
from tests.integrations.data_files import ROUTED
from tests.integrations.examples import BASE, nested
from tests.integrations.loops import fresh_state
from tests.ranks import run_ranks
from zerofx import ZeroConfig
from zerofx.errors import ConfigError, ShardingError

accelerate = pytest.importorskip("accelerate")

_OPTIONS: dict[str, Any] = {"inner": "eager", "min_shard_numel": 0}


def _recipe(**keys: Any) -> Any:
    return zerofx.from_deepspeed(nested({**BASE, "zero_optimization.stage": 3, **keys}), **_OPTIONS)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden) * self.scale


def _layers() -> nn.Module:
    return nn.Sequential(Layer(), Layer(), Layer())


def prepares_what_is_sharded() -> None:
    """Tokens are routed; casts and parts, which come before sharding, are refused."""
    from zerofx.integrations import Accelerator

    fresh_state()
    recipe = _recipe(**ROUTED)
    it, model = Accelerator(recipe, layer=Layer, cpu=True), _layers()
    zerofx.shard(model, recipe.config)
    for _ in range(2):  # a trainer prepares its model again for another run
        it.prepare(model)
        assert it.router is not None and it.router.kept == 4
        it.backward(model(torch.randn(2, 16, 8)).mean())
    with pytest.raises(ConfigError, match=r"routed already[\s\S]*`router`"):
        Accelerator(recipe, layer=Layer, cpu=True).prepare(model)
    for keys, said in (
        ({"data_types.buffer_dtype": "bf16"}, r"- 0\.scale\n[\s\S]*cast_model"),
        ({"tensor_parallel.autotp_size": 2}, r"whole on ranks[\s\S]*parallelize"),
    ):
        fresh_state()
        recipe = _recipe(**keys)
        it, model = Accelerator(recipe, cpu=True), _layers()
        zerofx.shard(model, recipe.config)
        with pytest.raises(ConfigError, match=said):
            it.prepare(model)
    fresh_state()
    recipe = _recipe(**{"data_types.buffer_dtype": "bf16", "bf16.enabled": True})
    it, model = Accelerator(recipe, cpu=True), _layers()
    assert it.prepare(it.prepare(model)) is model


def test_a_model_that_is_sharded_is_routed_or_refused() -> None:
    run_ranks(2, prepares_what_is_sharded, timeout=200)


class Counting(nn.Module):
    """Its buffer is this rank's until a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mine", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.mine


@pytest.mark.parametrize("given", [{"stage": 2}, 2, "ds_config.json"])
def test_what_is_no_configuration_is_refused(given: Any) -> None:
    pytest.importorskip("transformers")
    from zerofx.integrations import Accelerator, Trainer

    for integration in (lambda: Accelerator(given), lambda: Trainer(nn.Linear(2, 2), zero=given)):
        with pytest.raises(ConfigError, match="neither a configuration nor a recipe"):
            integration()


def wraps_otherwise(folder: str) -> None:
    import transformers
    from accelerate.utils import DistributedDataParallelKwargs

    from zerofx.integrations import Accelerator, Trainer

    def accelerator(config: ZeroConfig | None = None, **kwargs: Any) -> Any:
        fresh_state()
        handlers = [DistributedDataParallelKwargs(**kwargs)]
        return Accelerator(config, cpu=True, kwargs_handlers=handlers)

    def after_forward(model: Any) -> float:
        model.mine.fill_(dist.get_rank())
        model(torch.zeros(1, 2))
        return model.mine.item()

    stage_1 = ZeroConfig(stage=1, **_OPTIONS)
    assert after_forward(accelerator(stage_1).prepare(Counting())) == 0
    kept = accelerator(stage_1, broadcast_buffers=False).prepare(Counting())
    assert after_forward(kept) == dist.get_rank()
    assert accelerator(broadcast_buffers=False).prepare(kept) is kept
    with pytest.raises(ShardingError, match="broadcast_buffers"):
        shared = zerofx.shard(Counting(), stage_1)
        accelerator(broadcast_buffers=False).prepare(shared)
    for name, value in {"comm_hook": "fp16", "comm_wrapper": "bf16", "bucket_cap_mb": 50}.items():
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            accelerator(**{name: value})
    args = transformers.TrainingArguments(
        folder, ddp_broadcast_buffers=False, use_cpu=True, report_to="none"
    )
    trainer: Any = Trainer(Counting(), args, zero=stage_1)
    assert after_forward(trainer.accelerator.prepare(trainer.model)) == dist.get_rank()


def test_arguments_of_ddp_hold_or_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, wraps_otherwise, str(tmp_path), timeout=200)


def counts_otherwise(folder: str) -> None:
    import transformers
    from accelerate.utils import GradientAccumulationPlugin

    from zerofx.integrations import Accelerator, Trainer

    recipe = _recipe(gradient_accumulation_steps=4)
    said = "gradient_accumulation_steps: 4 in the file, 8 for the accelerator"
    fresh_state()
    with (
        patch.dict("os.environ", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}),
        pytest.raises(ConfigError, match=said),
    ):
        Accelerator(recipe, cpu=True)
    with pytest.raises(ConfigError, match=said):
        plugin = GradientAccumulationPlugin(num_steps=8)
        Accelerator(recipe, cpu=True, gradient_accumulation_plugin=plugin)
    it = Accelerator(recipe, cpu=True, gradient_accumulation_plugin=None)
    assert it.gradient_accumulation_steps == 4
    fresh_state()
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 8}},
        use_cpu=True,
        report_to="none",
    )
    with pytest.raises(ConfigError, match="4 in the file, 8 for the trainer"):
        Trainer(_layers(), args, zero=recipe)


def test_accumulation_is_the_files_wherever_it_is_said(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, counts_otherwise, str(tmp_path), timeout=200)


def schedules() -> list[float]:
    """Rates after each of some micro-batches, of which two are a step; one step overflows."""
    from zerofx.integrations import Accelerator

    fresh_state()
    warmup = {"warmup_num_steps": 10, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    keys: dict[str, Any] = {f"scheduler.params.{key}": value for key, value in warmup.items()}
    keys |= {"fp16.enabled": True, "fp16.initial_scale_power": 4, "optimizer.type": "AdamW"}
    recipe = _recipe(**keys, **{"gradient_accumulation_steps": 2, "scheduler.type": "WarmupLR"})
    it: Any = Accelerator(recipe, cpu=True)
    optimizer = recipe.make_optimizer((net := nn.Linear(8, 1)).parameters())
    schedule = recipe.make_scheduler(optimizer)
    model, optimizer, schedule = it.prepare(net, optimizer, schedule)
    assert it.prepare(schedule) is schedule
    rates = []
    for number in range(10):
        with it.accumulate(model):
            loss = model(torch.ones(2, 8)).mean()
            it.backward(loss * torch.inf if number == 5 else loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_recipes_schedule_goes_on_by_steps() -> None:
    for rates in run_ranks(2, schedules, timeout=200):
        # DeepSpeed counts from -1; the third step is skipped.
        assert rates == pytest.approx([0, 0, 0, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.3])


class Softened(nn.Module):
    """Autocast would have the softmax in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(-1)


def computes_in_16_bits(folder: str) -> None:
    import transformers

    from zerofx.integrations import Accelerator, Trainer, auto_values

    found = []
    for given in ("no", "bf16"):
        fresh_state()
        recipe = _recipe(**{"bf16.enabled": True})
        model = Accelerator(recipe, cpu=True, mixed_precision=given).prepare(Softened())
        found.append(model(torch.ones(2, 8)).dtype)
    assert found == [torch.bfloat16] * 2
    fresh_state()
    with pytest.raises(ConfigError, match=r"mixed_precision: torch\.float16 in the file"):
        recipe = _recipe(**{"fp16.enabled": True})
        Accelerator(recipe, cpu=True, mixed_precision="bf16")
    fresh_state()
    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, bf16=True, use_cpu=True, report_to="none"
    )
    file = nested({**BASE, "bf16.enabled": "auto", "gradient_clipping": "auto"})
    recipe = zerofx.from_deepspeed(file, auto=auto_values(args), **_OPTIONS)
    trainer: Any = Trainer(Softened(), args, zero=recipe)
    with trainer.compute_loss_context_manager():
        assert not torch.is_autocast_enabled("cpu")
    assert recipe.chosen.param_dtype is torch.bfloat16


def test_what_a_file_has_in_16_bits_needs_no_autocast(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, computes_in_16_bits, str(tmp_path), timeout=200)


def parallel_otherwise() -> list[int]:
    """Which samples a rank takes if a configuration asks for what is done anyway."""
    from zerofx.integrations import Accelerator

    def accelerator(**sizes: int) -> Any:
        fresh_state()
        config = accelerate.ParallelismConfig(**sizes)
        # Accelerate has it on GPUs only.
        with patch.object(accelerate.ParallelismConfig, "_validate_accelerator"):
            return Accelerator(ZeroConfig(**_OPTIONS), cpu=True, parallelism_config=config)

    for name, remedy in {
        "tp_size": "tensor_parallel",
        "sp_size": "sequence_parallel",
        "dp_shard_size": "replicate",
    }.items():
        with pytest.raises(ConfigError, match=rf"ParallelismConfig\({name}=2\)[\s\S]*{remedy}"):
            accelerator(**{name: 2})
    it = accelerator(dp_replicate_size=2)
    model, data = it.prepare(_layers(), DataLoader(range(8), batch_size=2))
    it.backward(model(torch.ones(2, 8)).mean())
    return [int(each) for batch in data for each in batch]


def test_other_parallelism_is_refused() -> None:
    assert run_ranks(2, parallel_otherwise, timeout=200) == [[0, 1, 4, 5], [2, 3, 6, 7]]
