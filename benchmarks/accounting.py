"""What each stage holds and sends, measured and beside its formula.

    python -m benchmarks.accounting                      # prints the table
    python -m benchmarks.accounting --markdown docs/accounting.md

Trains a small GPT in fp32 with Adam on gloo ranks of this machine. Memory is the sum of live
storages; traffic is counted at the calls of `torch.distributed` (`benchmarks.meters`), so neither
comes from zerofx's own books.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.meters import WireMeter, live_storages

STAGES = (0, 1, 2, 3)
_BYTES = 4
_INTRODUCTION = """# What each stage holds and sends

Made by `python -m benchmarks.accounting --markdown docs/accounting.md`: a GPT with Ψ = {psi:.1f} M
parameters, fp32, Adam, gloo. Numbers are per rank and in units of Ψ (bytes for memory, parameters
for traffic): *measured / formula*. Memory is the sum of live storages, traffic is counted at the
calls of `torch.distributed`; neither comes from zerofx's own books.

- **at rest**: after an optimizer step, gradients still held. Stages 1 and 2 hold the same there.
- **as backward exchanges**: at the first call of a step's gradient exchange. Stage 1 holds all full
  gradients then, which is what its formula 8Ψ+8Ψ/W counts; stage 2 holds one bucket of them.
  Activations and the gathered layer are in this number, and in no formula.
- **buffers**: idle memory of gathers, kept for the next one (stage 3 only).
- **sent**: bytes per optimizer step, divided by 4Ψ(W−1)/W; with k = 2 micro-batches too (stages 0
  and 1 with `accumulate=2`).

Padding: a parameter is split by rows, as `DTensor` and FSDP2 do, so the last shard is padded. On
SmolLM2-135M it costs nothing at W = 2, 4, 8, 16, 32, 64, less than 2 % at every W up to 24, and at
most 6 % (W = 63) at any W up to 64.
"""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One rank of one stage; bytes.

    Attributes:
        stage: ZeRO stage.
        num_ranks: W.
        num_params: Ψ.
        at_rest: model state after a step, gradients held.
        exchanging: everything alive when backward first communicates a gradient.
        buffers: idle buffers at rest.
        sent: by number of micro-batches, bytes sent per optimizer step.
    """

    stage: int
    num_ranks: int
    num_params: int
    at_rest: int
    exchanging: int
    buffers: int
    sent: dict[int, float]

    def in_psi(self, size: float) -> float:
        """Bytes as a multiple of Ψ."""
        return size / self.num_params

    def sent_in_psi(self, micro_batches: int) -> float:
        """Traffic in parameters, as a multiple of Ψ(W−1)/W."""
        share = (self.num_ranks - 1) / self.num_ranks
        return self.sent[micro_batches] / (_BYTES * self.num_params * share)


def expected_at_rest(stage: int, num_ranks: int) -> float:
    """Bytes per parameter after a step: parameters, gradients and Adam's two moments in fp32."""
    full = {0: 16, 1: 4, 2: 4, 3: 0}[stage]
    return full + (16 - full) / num_ranks


def expected_exchanging(stage: int, num_ranks: int) -> float:
    """Bytes per parameter when the gradient exchange begins, without activations."""
    full = {0: 16, 1: 8, 2: 4, 3: 0}[stage]
    split = {0: 0, 1: 8, 2: 8, 3: 12}[stage]
    return full + split / num_ranks


def expected_sent(stage: int, micro_batches: int) -> int:
    """Parameters sent per step, as a multiple of Ψ(W−1)/W."""
    return {0: 2, 1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]


class Block(nn.Module):
    """Attention and a feed-forward layer, without biases."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Residual stream in, residual stream out."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        heads = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A causal language model with tied embeddings; its forward returns the loss."""

    def __init__(self, vocabulary: int = 1024, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss of the next tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def measure(
    stage: int, micro_batches: Sequence[int] = (1, 2), width: int = 256, depth: int = 6
) -> Measurement:
    """Train one stage on the ranks of the default group, and look at this rank."""
    gc.collect()
    before = set(live_storages()[0])
    num_params, at_rest, exchanging, buffers = 0, 0, 0, 0
    sent = {}
    for count in micro_batches:
        torch.manual_seed(0)
        model = Gpt(width=width, depth=depth)
        num_params = sum(param.numel() for param in model.parameters())
        peaks, sent[count] = _train(model, stage, count, before)
        if count == 1:
            exchanging = peaks[0]
            held, idle = live_storages()
            at_rest = sum(size for address, size in held.items() if address not in before)
            buffers = sum(idle.values())
        del model
        torch._dynamo.reset()
        gc.collect()
    return Measurement(
        stage, dist.get_world_size(), num_params, at_rest, exchanging, buffers, sent
    )


def _train(
    model: Gpt, stage: int, micro_batches: int, before: set[int]
) -> tuple[list[int], float]:
    """Two steps to settle, one to measure; leaves the gradients of the last one in place.

    Returns:
        Bytes alive at the first collective of the measured backward, and bytes sent in the step.
    """
    options = {"inner": "eager", "min_shard_numel": 0}
    if stage < 2:
        options["accumulate"] = micro_batches
    compiled = torch.compile(model, backend=f"zero{stage}", options=options)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    meter = WireMeter()
    peaks: list[int] = []

    def look() -> None:
        if not peaks and _in_gradient_exchange():
            held, _ = live_storages()
            peaks.append(sum(size for address, size in held.items() if address not in before))

    for step in range(3):
        opt.zero_grad()
        last = step == 2
        with meter.attached():
            meter.sent = 0.0
            for _ in range(micro_batches):
                loss = compiled(torch.randint(1024, (1, 16)))
                meter.on_call = look if last else meter.on_call
                loss.backward()
                del loss
            opt.step()
    grads = [param.grad for param in model.parameters()]
    assert all(grad is not None for grad in grads)
    _KEEP[:] = [opt, grads, compiled]
    return peaks or [0], meter.sent


_KEEP: list[object] = []
