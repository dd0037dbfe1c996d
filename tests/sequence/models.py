"""Language models whose ranks share sequences; nothing in them says so."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, LONGEST = 11, 16, 4, 16
F64: dict[str, Any] = {"dtype": torch.float64}


class Block(nn.Module):
    """Pre-norm; with `rotary`, positions turn heads, of which pairs share keys and values."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.shared = 2 if rotary else 1
        kept = WIDTH // self.shared
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, **F64) for _ in range(2))
        self.heads = nn.Linear(WIDTH, WIDTH + 2 * kept, **F64)
        self.out = nn.Linear(WIDTH, WIDTH, **F64)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, **F64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, **F64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.mix(self.norms[0](x)))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

    def mix(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        sizes = (WIDTH, WIDTH // self.shared, WIDTH // self.shared)
        parts = self.heads(x).split(sizes, -1)
        q, k, v = (part.view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for part in parts)
        if self.rotary:
            q, k = turned(q, length), turned(k, length)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.rotary)
        return mixed.transpose(1, 2).reshape(rows, length, WIDTH)


def turned(x: Tensor, length: int) -> Tensor:
    angles = torch.arange(length, **F64)[:, None] / torch.tensor([1.0, 7.0], **F64)
    cos, sin = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Gpt(nn.Module):
    """The head is the embedding; the loss is of labels moved by one, and logits come along."""

    def __init__(self, *, depth: int = 1, rotary: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, **F64)
        self.places = None if rotary else nn.Embedding(LONGEST, WIDTH, **F64)
        self.blocks = nn.ModuleList(Block(rotary) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH, **F64)
        self.checkpoints = checkpoints

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids)
        if self.places is not None:
            x = x + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        following = F.pad(labels[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten()), logits


def batch(step: int, length: int = 8, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens, and labels that are missing here and there, and of most of one row."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    missing = torch.rand(rows, length, generator=generator) > 0.7
    missing[0, length // 4 :] = True
    return ids, ids.masked_fill(missing, -100)
