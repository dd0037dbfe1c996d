"""Train a small character GPT on Shakespeare from nothing, in about a minute.

    python examples/quickstart.py
    torchrun --nproc-per-node 2 examples/quickstart.py

The same program on one rank or many: `torch.compile` with a zerofx backend is all it takes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit.corpus import Text, Windows, held_out_batches, python_manual, shakespeare
from kit.display import Display, draw_losses
from kit.options import training_parser
from kit.world import World, join
from torch import Tensor, nn


class Block(nn.Module):
    """Attention, then a small network; each adds to the stream it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform a [batch, length, width] stream."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder whose output layer is its embedding."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the character that follows each character."""
        x = self.token(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Characters:
    """The alphabet of a text: characters to numbers and back."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self.numbers = {character: number for number, character in enumerate(self.alphabet)}

    def encode(self, text: str) -> Tensor:
        """The text as one row of numbers."""
        return torch.tensor([self.numbers[c] for c in text], dtype=torch.int32)

    def decode(self, row: Tensor) -> str:
        """The text that a row of numbers spells."""
        return "".join(self.alphabet[number] for number in row.tolist())


def main(argv: list[str] | None = None) -> None:
    """Train, measure, and show what the model writes."""
    args = parse_arguments(argv)
    with join() as world:
        display = Display(world)
        torch.manual_seed(args.seed)
        with display.phase("text"):
            text = load_text(args, world)
            characters = Characters("".join(text.train + text.held_out))
            train = characters.encode("".join(text.train))
            kept = characters.encode("".join(text.held_out))

        model = GPT(len(characters.alphabet), args.length, args.width, args.depth)
        model.to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        compiled = torch.compile(model, backend=f"zero{args.stage}", options={"inner": args.inner})

        shape = {"length": args.length, "batch": args.batch}
        place = {"rank": world.rank, "world": world.size}
        stream = Windows(train, seed=args.seed, **shape, **place)
        held_out = held_out_batches(kept, windows=4 * args.batch * world.size, **shape, **place)

        def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
            logits = compiled(tokens.to(world.device))
            return F.cross_entropy(logits.flatten(0, 1), targets.to(world.device).flatten())

        @torch.no_grad()
        def evaluate() -> float:
            losses = [loss_of(*batch).item() for batch in held_out]
            return world.gather(sum(losses) / len(losses)).mean().item()

        size = sum(parameter.numel() for parameter in model.parameters())
        display.title(
            "A character GPT",
            {
                "model": f"{size:,} parameters, {len(characters.alphabet)} characters",
                "ranks": f"{world.size} on {world.device.type}",
                "backend": f"zero{args.stage}, inner compiler {args.inner}",
            },
        )
        with display.phase("held-out loss before training, and compiling for it"):
            before = evaluate()

        history: list[float] = []
        with display.steps(0, args.steps):
            for number in range(1, args.steps + 1):
                loss = loss_of(*stream.next())
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

                ranks = world.gather(loss.item(), world.memory_bytes())
                history.append(ranks[:, 0].mean().item())
                tokens = world.size * args.batch * args.length
                display.step(number, history[-1], tokens, ranks[:, 1].max().item())

        after = evaluate()
        display.result(before, after)
        prompt = held_out[0][0]
        written = write(compiled, prompt.to(world.device), args.sample_characters)
        display.sample(characters.decode(prompt[0]), characters.decode(written))
        if world.leads and history:
            picture, title = args.out / "loss.png", "A character GPT"
            drawn = draw_losses(picture, history, before, after, title)
            display.console.print(f"[dim]{drawn}")


def load_text(args: argparse.Namespace, world: World) -> Text:
    """Shakespeare, which one rank of each machine downloads for the others."""
    if args.tiny:
        return python_manual()
    with world.first_on_node() as first:
        if first:
            shakespeare(args.cache)
    return shakespeare(args.cache)


@torch.no_grad()
def write(compiled: Callable[[Tensor], Tensor], window: Tensor, count: int) -> Tensor:
    """Continue the first row of a batch by `count` characters, all ranks in lockstep.

    Every forward sees a full window, which slides along the text: one shape, compiled once.
    """
    written: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        chances = (compiled(window)[:, -1].float() / 0.7).softmax(-1).cpu()
        chosen = torch.multinomial(chances, 1, generator=generator).to(window.device)
        # The ranks began with different text: all follow the first.
        dist.broadcast(chosen, src=0)
        written.append(chosen[0])
        window = torch.cat([window[:, 1:], chosen], dim=1)
    return torch.cat(written)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; its defaults take about a minute on two CPU cores."""
    parser = training_parser(
        __doc__,
        unit="characters",
        tiny="text from Python itself",
        steps=160,
        length=64,
        batch=16,
        lr=2e-3,
        out=Path("runs/quickstart"),
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--sample-characters", type=int, default=120)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
