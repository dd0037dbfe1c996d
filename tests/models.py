"""The zoo: small models, each chosen for one way in which sharding can go wrong.

    model = make("gpt", torch.float32)
    loss = model(*batch("gpt", rank=0, step=3, dtype=torch.float32))

Every `forward` takes the batch and returns the loss, so that the loss is compiled as well. Weights
depend on (name, seed), batches on (name, rank, step), and on nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.device import DEVICE
from tests.transformers_zoo import Encoder, EncoderDecoder, Gpt, encoder_decoder_data, gpt_data

Batch = tuple[Tensor, ...]


class Mlp(nn.Module):
    """No dimension is divisible by 2 or 4, so every shard is uneven and padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 5)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


class DropoutMlp(Mlp):
    """Random streams must be those of the model without zerofx."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(2, nn.Dropout(0.3))


class Breaks(nn.Module):
    """A graph break in the middle of forward: two frames, each its own program."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(7, 9)
        self.after = nn.Linear(9, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        torch._dynamo.graph_break()
        return F.mse_loss(self.after(x), y)


class Twice(nn.Module):
    """One module is called twice in a forward: two gathers, one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.inner(torch.tanh(self.inner(x))))), y)


class Frozen(nn.Module):
    """Frozen layers at both ends and one frozen bias: gathered, never reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13).requires_grad_(False)
        self.middle = nn.Linear(13, 11)
        self.last = nn.Linear(11, 5).requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))), y)


class Cnn(nn.Module):
    """BatchNorm buffers, which ranks update differently, and 4-D weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 5, 3, stride=2)
        self.norm2 = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        # Norm after relu: before it, the convolution's bias would have no gradient but rounding.
        x = self.norm2(F.relu(self.conv2(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Lstm(nn.Module):
    """Dynamo skips the frame of `nn.LSTM`, whose flat weights are read behind the module's back."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 9, num_layers=2, batch_first=True)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.lstm(x)[0]), y)


class MoE(nn.Module):
    """Even rows go to expert 0, odd ones to expert 2; 1 and 3 are unused, on every rank alike."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(7, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 7)) for _ in range(4)
        )
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        routed = [
            rows + gates[turn::2, used, None] * self.experts[used](rows)
            for turn, used, rows in ((0, 0, x[0::2]), (1, 2, x[1::2]))
        ]
        return F.mse_loss(self.head(torch.cat(routed)), torch.cat([y[0::2], y[1::2]]))


class Odd(nn.Module):
    """A 0-d parameter, a zero-element one, and one that takes part in nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.linear = nn.Linear(7, 5)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.cat([x, self.empty])
        return F.mse_loss(self.linear(x) * self.scale, y)


class Thin(nn.Module):
    """Parameters with fewer rows than there are ranks: some ranks own nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(7, 1)
        self.up = nn.Linear(1, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.up(torch.tanh(self.down(x))), y)


class Mixed(nn.Module):
    """fp64, fp32 and bf16 parameters in one model, whatever dtype is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fp64 = nn.Linear(7, 9)
        self.fp32 = nn.Linear(9, 9)
        self.bf16 = nn.Linear(9, 5)

    def to_own_dtypes(self) -> None:
        self.fp64.to(torch.float64)
        self.fp32.to(torch.float32)
        self.bf16.to(torch.bfloat16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.fp64(x.double()))
        x = torch.tanh(self.fp32(x.float()))
        return F.mse_loss(self.bf16(x.bfloat16()).float(), y.float())


def _regression(generator: torch.Generator, rows: int, dtype: torch.dtype) -> Batch:
    # Something learnable: on pure noise, training itself would magnify rounding differences.
    x = torch.randn(rows, 7, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.tanh(2 * x[:, :5]).to(dtype)


def _thin_data(generator: torch.Generator, rows: int, dtype: torch.dtype) -> Batch:
    x, y = _regression(generator, rows, dtype)
    return x, y[:, :3]


def _images(generator: torch.Generator, rows: int, dtype: torch.dtype) -> Batch:
    x = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x.to(dtype), x[:, :, 0, 0].argmax(1)


def _sequences(generator: torch.Generator, rows: int, dtype: torch.dtype) -> Batch:
    x = torch.randn(rows, 6, 7, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.tanh(x.cumsum(1)[..., :5]).to(dtype)


@dataclass(frozen=True)
class Entry:
    """A model of the zoo and what an oracle must know about it."""

    build: Callable[[], nn.Module]
    data: Callable[[torch.Generator, int, torch.dtype], Batch]
    unused: bool = False
    """Some trainable parameters get no gradient: DDP needs `find_unused_parameters`."""
    explicit: bool = False
    """Needs `zerofx.shard(model, …)` before compiling; the one line alone is refused."""
    graph_breaks: bool = False
    """Not one graph: `fullgraph=True` fails."""
    fsdp: bool = True
    """`fully_shard` can train it."""
    fsdp_blocks: tuple[str, ...] = ()
    """Modules to `fully_shard` before the root."""


ZOO = {
    "mlp": Entry(Mlp, _regression),
    "dropout": Entry(DropoutMlp, _regression),
    "gpt": Entry(Gpt, gpt_data),
    "gpt_checkpointed": Entry(lambda: Gpt(checkpointed=True), gpt_data),
    "encoder": Entry(Encoder, gpt_data),
    "encoder_decoder": Entry(EncoderDecoder, encoder_decoder_data),
    "cnn": Entry(Cnn, _images),
    "lstm": Entry(Lstm, _sequences, explicit=True, graph_breaks=True),
    "moe": Entry(MoE, _regression, unused=True),
    "frozen": Entry(Frozen, _regression),
    "twice": Entry(Twice, _regression),
    "breaks": Entry(Breaks, _regression, graph_breaks=True),
    "thin": Entry(Thin, _thin_data),
    # FSDP2 refuses 0-d parameters and reduces only gradients of one dtype per group.
    "odd": Entry(Odd, _regression, unused=True, fsdp=False),
    "mixed": Entry(Mixed, _regression, fsdp_blocks=("fp64", "fp32", "bf16")),
}


def make(name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    """The model `name`, the same wherever it is made; the caller's random state is untouched."""
    with torch.random.fork_rng():
        torch.manual_seed(zlib.crc32(f"{name}/{seed}".encode()))
        model = ZOO[name].build()
        with torch.no_grad():
            for parameter in model.parameters():
                # Zeros and ones would look right even if shards were swapped between ranks.
                if parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all():
                    parameter += 0.1 * torch.randn_like(parameter)
    # Drawn in fp32 and then cast, so that both dtypes start from the same numbers.
    model.to(dtype)
    if isinstance(model, Mixed):
        model.to_own_dtypes()
    return model.to(DEVICE)


def batch(
    name: str, rank: int, step: int, dtype: torch.dtype = torch.float32, *, rows: int = 4
) -> Batch:
    """The batch of one rank at one step; `model(*batch(…))` is its loss."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{rank}/{step}".encode()))
    return tuple(value.to(DEVICE) for value in ZOO[name].data(generator, rows, dtype))
