"""Train a small character GPT as a DeepSpeed configuration says.

    torchrun --nproc-per-node 2 examples/from_ds_config.py
    torchrun --nproc-per-node 2 examples/from_ds_config.py --config my_ds_config.json

Stage, buckets, precision, optimizer, schedule, clipping and accumulation come from the file; the
loop is still one's own. What stands as "auto" in the file comes from the command line.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kit.corpus import Windows, python_manual
from kit.world import join
from quickstart import GPT, Characters

import zerofx

LENGTH = 64


def main(argv: list[str] | None = None) -> None:
    """Read the file, show how it was understood, train and save."""
    args = parse_arguments(argv)
    with join() as world:
        recipe = zerofx.from_deepspeed(
            args.config,
            auto={"optimizer.params.lr": args.lr, "scheduler.params.total_num_steps": args.steps},
            inner=args.inner,
        )
        if world.leads:
            print(recipe, end="\n\n")

        text = "".join(python_manual().train)
        characters = Characters(text)
        stream = Windows(
            characters.encode(text),
            length=LENGTH,
            batch=recipe.batch.micro,
            rank=world.rank,
            world=world.size,
            seed=0,
        )
        torch.manual_seed(0)
        model = GPT(len(characters.alphabet), LENGTH, args.width, args.depth).to(world.device)
        recipe.cast_model(model)
        zerofx.shard(model, recipe.config)
        compiled: Any = torch.compile(model, backend=recipe.backend, options=recipe.options)
        optimizer = recipe.make_optimizer(model.parameters())
        scheduler = recipe.make_scheduler(optimizer)
        scaler = recipe.make_scaler(world.device.type)
        report = recipe.make_report(optimizer, scaler)

        for number in range(1, args.steps + 1):
            mean = torch.zeros((), device=world.device)
            for _ in range(recipe.batch.accumulation):
                tokens, targets = (part.to(world.device) for part in stream.next())
                with report.measure("forward"), recipe.autocast(world.device.type):
                    logits = compiled(tokens).float()
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                with report.measure("backward"):
                    recipe.backward(loss, scaler)
                mean += loss.detach() / recipe.batch.accumulation
            with report.measure("step"):
                recipe.step(optimizer, scaler, scheduler)
            report.step(mean.item())
            average = world.gather(mean.item()).mean().item()
            if world.leads and number in (1, args.steps):
                print(f"step {number}: loss {average:.3f}")

        recipe.save_model(model, args.out)
        if world.leads:
            print(f"weights in 16 bits: {args.out}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; its defaults take about a minute on two CPU cores."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    here = Path(__file__).parent
    parser.add_argument("--config", type=Path, default=here / "ds_config.json")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3, help='the "auto" learning rate')
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/from_ds_config"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
