"""A small training run, by DeepSpeed or by hand: what `test_deepspeed.py` compares.

The checkpoints in `tests/checkpoint/deepspeed` were written with deepspeed 0.19.8 on two CPU ranks,
`zero_to_*.py` removed:

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 -m tests.checkpoint.deepspeed_run STAGE FOLDER
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 3
VOCABULARY, WIDTH = 7, 6


class Net(nn.Module):
    """Tied, frozen and uneven parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, 5).requires_grad_(False)
        self.body = nn.Linear(5, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor([3.0, 4.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.frozen(self.embed(tokens)))))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and vectors without weight decay."""
    params = [param for param in model.parameters() if param.requires_grad]
    vectors = [param for param in params if param.ndim < 2]
    return [{"params": [p for p in params if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}]


def batch(rank: int, step: int) -> Tensor:
    """Tokens `(2, 4)`, int64."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(0, VOCABULARY, (2, 4), generator=generator)


def loss_of(logits: Tensor) -> Tensor:
    """Some loss."""
    return logits.float().logsumexp(-1).mean()


def main() -> None:
    """Train and save with DeepSpeed."""
    deepspeed: Any = importlib.import_module("deepspeed")
    stage, folder = int(sys.argv[1]), sys.argv[2]
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": stage == 1},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    for step in range(STEPS):
        engine.backward(loss_of(engine(batch(engine.global_rank, step))))
        engine.step()
    engine.save_checkpoint(folder, client_state={"data_position": 12})


if __name__ == "__main__":
    main()
