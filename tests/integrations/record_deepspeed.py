"""Writes down what DeepSpeed computes, for tests that do not have it.

DS_ACCELERATOR=cpu python -m tests.integrations.record_deepspeed     # deepspeed 0.19.8
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

RECORD = Path(__file__).parent / "deepspeed_values.json"
STEPS = 24
LR = 3e-3

_WARMUP = {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3}
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {}),
    ("WarmupLR", {**_WARMUP, "warmup_num_steps": 7}),
    ("WarmupLR", {**_WARMUP, "warmup_num_steps": 1, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_max_lr": [1e-3, 2e-3], "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupDecayLR", {**_WARMUP, "total_num_steps": 20, "warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 6, "warmup_num_steps": 9, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 6}),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 15,
            "warmup_num_steps": 4,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
            "warmup_type": "linear",
        },
    ),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 8}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 5,
            "cycle_second_step_size": 7,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 3,
            "decay_step_size": 2,
            "decay_lr_rate": 0.3,
            "cycle_min_mom": 0.85,
            "cycle_max_mom": 0.95,
            "decay_mom_rate": 0.01,
        },
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 4,
            "cycle_momentum": False,
        },
    ),
    ("LRRangeTest", {}),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 5,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
    ),
]

SCALERS: list[tuple[dict[str, Any], str]] = [
    # A dot is a clean step, an x an overflow.
    ({"scale_window": 3}, "....x..........xx.x......."),
    ({"scale_window": 3, "delayed_shift": 1}, "..x......xx.....x........"),
    ({"scale_window": 2, "delayed_shift": 3}, "x.x.x.xxxx........xx.x..x."),
    ({"scale_window": 4, "consecutive_hysteresis": True}, "x.x.xx......x......xxx.x."),
    ({"scale_window": 1, "init_scale": 8.0, "min_scale": 2.0}, ".xxx.x..x.xxxxxx"),
    ({"scale_window": 5, "init_scale": 8.0, "delayed_shift": 1}, "xxx....xx"),
]
SCALER_DEFAULTS = {
    "init_scale": 2.0**16,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
}


_LOOP: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
}
TRAININGS: list[dict[str, Any]] = [
    {
        **_LOOP,
        "gradient_clipping": 0.05,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.1, "torch_adam": True, "weight_decay": 0.1, "eps": 1e-4},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 3},
        },
    },
    {  # clips to the default norm
        **_LOOP,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9, "nesterov": True}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 0.5,
                "cycle_max_lr": 2.0,
                "cycle_first_step_size": 2,
                "cycle_momentum": False,
            },
        },
    },
]


class Net(torch.nn.Module):
    """What is trained; its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 9), torch.nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x))).square().mean()


def net() -> Net:
    """The same weights every time."""
    torch.manual_seed(0)
    return Net()


def draw(rank: int, step: int, micro: int) -> torch.Tensor:
    """The micro-batch of a rank."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    return torch.randn(2, 6, generator=generator)


def two_groups() -> torch.optim.Optimizer:
    """An optimizer with two learning rates."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.AdamW(
        [{"params": [params[0]]}, {"params": [params[1]], "lr": LR / 2}], lr=LR
    )


def _schedule(name: str, params: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.runtime import lr_schedules

    optimizer = two_groups()
    schedule = getattr(lr_schedules, name)(optimizer, **params)
    lrs, betas = [], []
    for _ in range(STEPS):
        lrs.append([group["lr"] for group in optimizer.param_groups])
        betas.append(list(optimizer.param_groups[1]["betas"]))
        schedule.step()
    cycled = {"betas": betas} if name == "OneCycle" else {}
    return {"type": name, "params": params, "lrs": lrs, **cycled}


def _scaler(options: dict[str, Any], steps: str) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler, scales = DynamicLossScaler(**{**SCALER_DEFAULTS, **options}), []
    for step in steps:
        try:
            scaler.update_scale(step == "x")
        except Exception:
            break  # at the minimum
        scales.append(scaler.cur_scale)
    return {"options": options, "steps": steps, "scales": scales}


def _training(config: dict[str, Any]) -> dict[str, Any]:
    import deepspeed

    model = net()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step in range(5):
        for micro in range(config["gradient_accumulation_steps"]):
            loss = engine(10 * draw(0, step, micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    params = [param.flatten().tolist() for param in model.parameters()]
    return {"config": config, "losses": losses, "params": params}


def main() -> None:
    """Write the record."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**place, "MASTER_PORT": "29611"})
    import deepspeed

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    record = {
        "deepspeed": deepspeed.__version__,
        "command": "DS_ACCELERATOR=cpu python -m tests.integrations.record_deepspeed",
        "schedules": [_schedule(*each) for each in SCHEDULES],
        "scalers": [_scaler(*each) for each in SCALERS],
        "trainings": [_training(each) for each in TRAININGS],
    }
    text = json.dumps(record, indent=1)
    # A row of numbers on one line.
    RECORD.write_text(re.sub(r"\[[^][{}]*\]", lambda m: " ".join(m[0].split()), text) + "\n")


if __name__ == "__main__":
    main()
