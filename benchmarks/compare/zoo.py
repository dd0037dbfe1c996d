"""The models that contenders train, and their data.

Every `forward` takes a batch and returns the loss, so that whoever compiles compiles the loss too.
Weights depend on the name, batches on (name, rank, step), and on nothing else.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compare.layers import GptBlock, LlamaBlock, ResBlock, T5Block

VOCABULARY = 8192
Batch = tuple[Tensor, ...]


class Workload(nn.Module, ABC):
    """A model that knows its data.

    Attributes:
        unit: what `num_units` counts.
        num_units: tokens or images in one batch.
    """

    unit = "tokens"
    num_units = 0

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """What FSDP2 shards, and compiles, one by one."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Batch:
        """The arguments of one forward."""


class LanguageModel(Workload):
    """What decoders share: embedding, layers, norm and a head of its own."""

    def __init__(self, length: int, batch: int) -> None:
        super().__init__()
        self.shape = (batch, length)
        self.num_units = batch * length
        self.layers = nn.ModuleList()

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def batch(self, generator: torch.Generator) -> Batch:
        return (torch.randint(VOCABULARY, self.shape, generator=generator),)


class Gpt(LanguageModel):
    """The reference: 27.3 M parameters in six layers, of which 8.4 M in embedding and head."""

    def __init__(self, width: int = 512, depth: int = 6, length: int = 64, batch: int = 2) -> None:
        super().__init__(length, batch)
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(length, width)
        self.layers.extend(GptBlock(width, heads=8) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss of the next tokens."""
        x = self.token(tokens) + self.place(_positions(tokens))
        for layer in self.layers:
            x = layer(x)
        return _next_token_loss(self.head(self.norm(x)), tokens)


class Tiny(Gpt):
    """0.55 M parameters: to see that everything runs, not how fast."""

    def __init__(self) -> None:
        super().__init__(width=32, depth=2, length=16)


class LargeGpt(Gpt):
    """93 M parameters, and 16384 tokens: enough to keep a GPU busy."""

    def __init__(self) -> None:
        super().__init__(width=1024, depth=6, length=1024, batch=16)


class Llama(LanguageModel):
    """19.7 M parameters; four query heads share each pair of key and value heads."""

    angles: Tensor

    def __init__(self, width: int = 512, depth: int = 4, length: int = 64, batch: int = 2) -> None:
        super().__init__(length, batch)
        self.token = nn.Embedding(VOCABULARY, width)
        self.layers.extend(LlamaBlock(width, 8, 2, hidden=1408) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        half = width // 8 // 2
        speeds = 10000 ** -(torch.arange(half) / half)
        self.register_buffer("angles", torch.outer(torch.arange(length), speeds), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss of the next tokens."""
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return _next_token_loss(self.head(self.norm(x)), tokens)


class T5(Workload):
    """22.8 M parameters; encoder and decoder read one embedding, as in T5 v1.1."""

    def __init__(self, width: int = 384, depth: int = 4, length: int = 64, batch: int = 2) -> None:
        super().__init__()
        self.shape = (batch, length)
        self.num_units = 2 * batch * length
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(length, width)
        self.encoder = nn.ModuleList(T5Block(width, 6, 1024, decodes=False) for _ in range(depth))
        self.decoder = nn.ModuleList(T5Block(width, 6, 1024, decodes=True) for _ in range(depth))
        self.middle = nn.RMSNorm(width)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder, *self.decoder]

    def batch(self, generator: torch.Generator) -> Batch:
        source = torch.randint(VOCABULARY, self.shape, generator=generator)
        return source, torch.randint(VOCABULARY, self.shape, generator=generator)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Mean loss of the target's next tokens."""
        x = self.token(source) + self.place(_positions(source))
        for layer in self.encoder:
            x = layer(x)
        memory = self.middle(x)
        y = self.token(target) + self.place(_positions(target))
        for layer in self.decoder:
            y = layer(y, memory)
        return _next_token_loss(self.head(self.norm(y)), target)


class Cnn(Workload):
    """A residual network of 20.7 M parameters with batch norm, for images of 32 × 32."""

    unit = "images"
    num_units = 8

    def __init__(self) -> None:
        super().__init__()
        widths = [64] * 2 + [128] * 2 + [256] * 2 + [512] * 4
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(
            ResBlock(inputs, outputs)
            for inputs, outputs in zip([64, *widths], widths, strict=False)
        )
        self.head = nn.Linear(512, 100)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def batch(self, generator: torch.Generator) -> Batch:
        images = torch.randn(self.num_units, 3, 32, 32, generator=generator)
        return images, torch.randint(100, (self.num_units,), generator=generator)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of the labels."""
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


MODELS: dict[str, type[Workload]] = {
    "gpt": Gpt,
    "tiny": Tiny,
    "large": LargeGpt,
    "llama": Llama,
    "t5": T5,
    "cnn": Cnn,
}


def build(name: str) -> Workload:
    """The model with the same weights on every rank."""
    torch.manual_seed(zlib.crc32(name.encode()))
    return MODELS[name]()


def batches(model: Workload, rank: int, count: int) -> list[Batch]:
    """This rank's own data, step by step."""
    generators = (torch.Generator().manual_seed(1000 * step + rank) for step in range(count))
    return [model.batch(generator) for generator in generators]


def _positions(tokens: Tensor) -> Tensor:
    # Looked up rather than read as a weight, which DeepSpeed gathers only for the module it is of.
    return torch.arange(tokens.shape[1], device=tokens.device)


def _next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
