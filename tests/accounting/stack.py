"""A stack with as many parameters a layer as the measured GPT, and half as much to trace."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY = 256, 1024
LAYER = 12 * WIDTH * WIDTH


class Block(nn.Module):
    """A feed-forward layer with a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(6 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Tied embeddings around blocks; its forward returns the loss."""

    def __init__(self, width: int = WIDTH, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
