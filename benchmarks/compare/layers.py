"""The blocks that the models of the zoo stack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Heads that may share keys and values, and may read from another sequence."""

    def __init__(self, width: int, heads: int, shared_heads: int, causal: bool) -> None:
        super().__init__()
        self.size = width // heads
        self.grouped = shared_heads != heads
        self.causal = causal
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * shared_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, source: Tensor, angles: Tensor | None = None) -> Tensor:
        """Mix `source` into each position of `x`; `angles` turn queries and keys."""
        q = self.query(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        keys, values = self.key_value(source).chunk(2, dim=-1)
        k = keys.unflatten(-1, (-1, self.size)).transpose(1, 2)
        v = values.unflatten(-1, (-1, self.size)).transpose(1, 2)
        if angles is not None:
            q, k = _rotate(q, angles), _rotate(k, angles)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.grouped
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A feed-forward layer with a gate (SwiGLU)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GptBlock(nn.Module):
    """Layer norm, attention and a GELU network, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, heads, causal=True)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Residual stream in, residual stream out."""
        normed = self.norm1(x)
        x = x + self.attention(normed, normed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaBlock(nn.Module):
    """RMS norm, attention with grouped queries, and SwiGLU."""

    def __init__(self, width: int, heads: int, shared_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(width, heads, shared_heads, causal=True)
        self.norm2 = nn.RMSNorm(width)
        self.network = Gated(width, hidden)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Residual stream in, residual stream out."""
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, angles)
        return x + self.network(self.norm2(x))


class T5Block(nn.Module):
    """A layer of an encoder, or of a decoder that reads an encoder's output."""

    def __init__(self, width: int, heads: int, hidden: int, decodes: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.own = Attention(width, heads, heads, causal=decodes)
        self.cross_norm = nn.RMSNorm(width) if decodes else None
        self.cross = Attention(width, heads, heads, causal=False) if decodes else None
        self.norm2 = nn.RMSNorm(width)
        self.network = Gated(width, hidden)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """Residual stream in, residual stream out."""
        normed = self.norm1(x)
        x = x + self.own(normed, normed)
        if self.cross is not None and self.cross_norm is not None and source is not None:
            x = x + self.cross(self.cross_norm(x), source)
        return x + self.network(self.norm2(x))


class ResBlock(nn.Module):
    """Two convolutions with batch norm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images in, images out."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    even, odd = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
