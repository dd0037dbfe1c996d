"""Fine-tune SmolLM2-135M on Shakespeare with transformers' `Trainer`, sharded by ZeRO.

    torchrun --nproc-per-node 2 examples/trainer_smollm2.py
    torchrun --nproc-per-node 2 examples/trainer_smollm2.py --resume --steps 80

`Trainer` comes from `zerofx.integrations`; everything else is as transformers documents it.
The first run downloads the model (93 MB) and the plays (5 MB) and caches both.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from kit import smollm2
from kit.options import training_parser
from kit.world import join
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainingArguments

from zerofx import ZeroConfig
from zerofx.integrations import Trainer


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of equal length, spread evenly over a row of tokens."""

    def __init__(self, tokens: Tensor, *, length: int, count: int | None = None) -> None:
        self.tokens = tokens
        self.length = length
        most = len(tokens) // length
        starts = torch.linspace(0, len(tokens) - length, min(count or most, most))
        self.starts: list[int] = starts.long().tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.starts[index]
        window = self.tokens[start : start + self.length].long()
        return {"input_ids": window, "labels": window}  # the model shifts them itself


def main(argv: list[str] | None = None) -> None:
    """Measure, train, measure, and save what `from_pretrained` loads."""
    args = parse_arguments(argv)
    if args.resume and not any(args.out.glob("checkpoint-*")):
        raise SystemExit(f"--resume: there is no checkpoint in {args.out}")
    with join() as world:
        torch.manual_seed(args.seed)  # `--tiny` draws a model
        task = smollm2.load_on_all(world, args.cache, tiny=args.tiny)
        trainer = Trainer(
            task.model,
            training_arguments(args),
            train_dataset=Windows(task.train, length=args.length),
            eval_dataset=Windows(task.held_out, length=args.length, count=args.eval_windows),
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=most_likely,
            zero=ZeroConfig(stage=args.stage, inner=args.inner),
        )
        before = trainer.evaluate()
        trainer.train(resume_from_checkpoint=args.resume)
        after = trainer.evaluate()
        trainer.save_model(str(args.out / "model"))
        if world.leads:
            for name in ("eval_loss", "eval_accuracy"):
                print(f"{name}  {before[name]:.4f} → {after[name]:.4f}")


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    """transformers' arguments; none of them concerns zerofx."""
    return TrainingArguments(
        output_dir=str(args.out),
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 10),
        logging_steps=max(1, args.steps // 10),
        save_steps=args.save_every,
        disable_tqdm=True,
        report_to="none",
        seed=args.seed,
    )


def most_likely(logits: Tensor, labels: Tensor) -> Tensor:
    """What is kept of the logits, so that evaluation does not gather all of them."""
    return logits.argmax(-1)


def accuracy(found: Any) -> dict[str, float]:
    """Share of next tokens that were predicted."""
    return {"accuracy": float((found.predictions[:, :-1] == found.label_ids[:, 1:]).mean())}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; its defaults suit two CPU cores."""
    parser = training_parser(
        __doc__,
        unit="tokens",
        tiny="a small random model",
        steps=40,
        length=128,
        batch=1,
        lr=5e-5,
        out=Path("runs/trainer_smollm2"),
    )
    parser.add_argument("--accumulate", type=int, default=1, help="backwards per optimizer step")
    parser.add_argument("--eval-windows", type=int, default=16, help="held-out windows in all")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
