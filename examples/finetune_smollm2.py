"""Fine-tune SmolLM2-135M on Shakespeare, its state sharded over the ranks by ZeRO.

    torchrun --nproc-per-node 2 examples/finetune_smollm2.py
    torchrun --nproc-per-node 2 examples/finetune_smollm2.py --resume --steps 80

An ordinary PyTorch loop. The one line that concerns zerofx is the call of `torch.compile`.
The first run downloads the model (93 MB) and the plays (5 MB) and caches both.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit import checkpoint, smollm2
from kit.corpus import Windows, held_out_batches
from kit.display import Display, draw_losses
from kit.options import training_parser
from kit.world import World, join
from torch import Tensor

PROMPT = "HAMLET.\nWhat news, my lord? The king hath sent for thee, and"


def main(argv: list[str] | None = None) -> None:
    """Train, measure, save, and let the model speak."""
    args = parse_arguments(argv)
    found = checkpoint.latest(args.out / "checkpoints") if args.resume else None
    if args.resume and found is None:
        raise SystemExit(f"--resume: there is no checkpoint in {args.out / 'checkpoints'}")
    with join() as world:
        display = Display(world)
        torch.manual_seed(args.seed)
        with display.phase("model and text"):
            task = smollm2.load_on_all(world, args.cache, tiny=args.tiny)

        model = task.model.to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
        compiled = torch.compile(model, backend=f"zero{args.stage}", options={"inner": args.inner})

        def logits_of(tokens: Tensor) -> Tensor:
            return compiled(input_ids=tokens.to(world.device), use_cache=False).logits

        def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            logits = logits_of(inputs)
            return F.cross_entropy(logits.flatten(0, 1), targets.to(logits.device).flatten())

        shape = {"length": args.length, "batch": args.batch}
        place = {"rank": world.rank, "world": world.size}
        stream = Windows(task.train, seed=args.seed, **shape, **place)
        held_out = held_out_batches(task.held_out, windows=args.eval_windows, **shape, **place)

        display.title("SmolLM2 on Shakespeare", describe(args, world, model))
        with display.phase("held-out loss before training, and compiling for it"):
            before = evaluate(model, loss_of, held_out, world)

        # After the first forward, when the model is sharded: each rank reads only its own part.
        progress = checkpoint.Progress()
        if found is not None:
            with display.phase(f"resuming from {found}"):
                progress = checkpoint.load(found, model, optimizer, world)
            stream.position = progress.position

        with display.steps(progress.step, args.steps):
            while progress.step < args.steps:
                set_learning_rate(optimizer, args, progress.step)
                loss = loss_of(*stream.next())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

                ranks = world.gather(loss.item(), world.memory_bytes())
                progress.step += 1
                progress.position = stream.position
                progress.losses.append(ranks[:, 0].mean().item())
                tokens = world.size * args.batch * args.length
                memory = ranks[:, 1].max().item()
                display.step(progress.step, progress.losses[-1], tokens, memory)
                if progress.step % args.save_every == 0 or progress.step == args.steps:
                    checkpoint.save(args.out / "checkpoints", progress, model, optimizer, world)

        with display.phase("held-out loss after training"):
            after = evaluate(model, loss_of, held_out, world)
        with display.phase("a sample"):
            sample = generate(logits_of, task, args)

        display.result(before, after)
        display.sample(PROMPT, sample)
        if world.leads and progress.losses:
            picture = args.out / "loss.png"
            heading = f"SmolLM2-135M on Shakespeare, zero{args.stage}, {world.size} ranks"
            drawn = draw_losses(picture, progress.losses, before, after, heading)
            display.console.print(f"[dim]{drawn}")


def describe(args: argparse.Namespace, world: World, model: torch.nn.Module) -> dict[str, str]:
    """The facts that the heading shows."""
    size = sum(parameter.numel() for parameter in model.parameters())
    return {
        "model": f"{size:,} parameters, fp32",
        "ranks": f"{world.size} on {world.device.type}",
        "backend": f"zero{args.stage}, inner compiler {args.inner}",
        "batch": f"{args.batch} x {args.length} tokens per rank",
    }


def set_learning_rate(
    optimizer: torch.optim.Optimizer, args: argparse.Namespace, step: int
) -> None:
    """Warm up over the first tenth of the run, then fall to a tenth along a cosine."""
    warmup = max(1, args.steps // 10)
    decay = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)
    for group in optimizer.param_groups:
        group["lr"] = args.lr * min(1.0, (step + 1) / warmup) * decay


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batches: list[tuple[Tensor, Tensor]],
    world: World,
) -> float:
    """Mean loss over the held-out batches of all ranks."""
    model.eval()
    mine = sum(loss_of(*batch).item() for batch in batches) / len(batches)
    model.train()
    return world.gather(mine).mean().item()


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor], task: smollm2.Task, args: argparse.Namespace
) -> str:
    """Continue the prompt. Every rank takes part in every forward, since each holds a part.

    The shape is that of evaluation, so nothing is compiled again: tokens fill a fixed window
    from the left, and causal attention never looks at the padding that follows them.
    """
    prompt = task.encode(PROMPT)[: args.length // 2]
    end = min(args.length, len(prompt) + args.sample_tokens)
    window = torch.zeros(args.batch, args.length, dtype=torch.long)
    window[:, : len(prompt)] = torch.tensor(prompt)
    generator = torch.Generator().manual_seed(args.seed)
    task.model.eval()
    for place in range(len(prompt), end):
        top = logits_of(window)[0, place - 1].float().topk(20)
        chances = (top.values / 0.8).softmax(-1).cpu()
        chosen = top.indices[torch.multinomial(chances, 1, generator=generator)]
        # One rank's choice for all: rounding may differ between unlike machines.
        dist.broadcast(chosen, src=0)
        window[:, place] = chosen.cpu()
    return task.decode(window[0, len(prompt) : end].tolist())


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
        out=Path("runs/finetune_smollm2"),
    )
    parser.add_argument("--eval-windows", type=int, default=16, help="held-out windows in all")
    parser.add_argument("--sample-tokens", type=int, default=32)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
