"""The transformers of the zoo: decoder-only, encoder, encoder-decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEADS, TOKENS = 31, 12, 2, 6


class Block(nn.Module):
    """A pre-norm GPT block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Two layers, or one that is checkpointed; tied embeddings: one parameter, two uses."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(1 if checkpointed else 2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.3)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, whose attention reads its projections without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.encoder(self.embed(ids)))
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class EncoderDecoder(nn.Module):
    """Cross attention; the embedding serves both sides; the sides differ in length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.Linear(WIDTH, WIDTH)  # `Encoder` has a layer of torch's
        self.decoder = nn.TransformerDecoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        memory = torch.tanh(self.encoder(self.embed(source)))
        hidden = self.decoder(self.embed(ids), memory, tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def gpt_data(generator: torch.Generator, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Token ids and the next token of each."""
    start = torch.randint(VOCAB, (rows, 1), generator=generator)
    ids = (start + 3 * torch.arange(TOKENS + 1)) % VOCAB
    return ids[:, :-1], ids[:, 1:]


def encoder_decoder_data(
    generator: torch.Generator, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """A source two tokens shorter than the target, and the target's next tokens."""
    source = torch.randint(VOCAB, (rows, TOKENS - 2), generator=generator)
    return source, *gpt_data(generator, rows, dtype)
