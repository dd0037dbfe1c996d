"""Which random numbers recorded operations take: of which generator, and from which state on.

What is recorded draws nothing yet. After each recorded draw the generator is moved on a little, to
a state that stands for the end of that draw. The state that is found before another one then says
what went before: that draw, an earlier one whose state somebody kept and set again, or a seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Generator, Tensor

from zerofx.torch_private import generator_key


@dataclasses.dataclass(frozen=True)
class Source:
    """A generator on a tape, which a number names; torch's own ones come first."""

    number: int


@dataclasses.dataclass(frozen=True)
class Draw:
    """Numbers that an operation may take of one generator.

    Attributes:
        source: the generator.
        number: of the draw, among those of the tape.
        begins: where the last draw of its generator ended if `None`; else the state from which on,
            or the number of the draw at whose end.
    """

    source: Source
    number: int
    begins: Tensor | int | None


class Streams:
    """The generators that recorded operations draw from.

    Attributes:
        default: torch's own: the CPU's, and that of the device if it has one.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: dict[int, _Stream] = {}
        self._ends: dict[bytes, int] = {}  # draws by the states that stand for their ends
        self._moves: dict[bytes, int] = {}
        self.default = tuple(map(self.source, default_generators(device)))

    @property
    def generators(self) -> list[Generator]:
        """All, in the order of their numbers."""
        return [stream.generator for stream in self._streams.values()]

    def source(self, generator: Generator) -> Source:
        """What names `generator`."""
        key = generator_key(generator)
        if key not in self._streams:
            source = Source(len(self._streams))
            self._streams[key] = _Stream(source, generator, generator.get_state())
        return self._streams[key].source

    def is_default(self, generator: Generator) -> bool:
        """Whether it is one of torch's own."""
        stream = self._streams.get(generator_key(generator))
        return stream is not None and stream.source in self.default

    def draw(self, sources: Iterable[Source]) -> tuple[Draw, ...]:
        """An operation is recorded that draws from these."""
        streams = [*self._streams.values()]
        return tuple(self._draw(streams[source.number]) for source in dict.fromkeys(sources))

    def has_drawn(self, generator: Generator) -> bool:
        """Whether draws that are only recorded precede what `generator` would draw now."""
        return _key(generator.get_state()) in self._ends

    def give_back(self) -> None:
        """Generators are in the state again in which they were met."""
        for stream in self._streams.values():
            stream.generator.set_state(stream.start)

    def _draw(self, stream: _Stream) -> Draw:
        state, number = stream.generator.get_state(), len(self._ends)
        begins: Tensor | int | None = self._ends.get(_key(state), state)
        if isinstance(begins, int) and begins == stream.last:
            begins = None
        stream.last = number
        self._ends[self._moved_on(stream.generator)] = number
        return Draw(stream.source, number, begins)

    def _moved_on(self, generator: Generator) -> bytes:
        """Move `generator` to a state that stands for no draw yet, also from one met before."""
        start = _key(generator.get_state())
        moves = self._moves.get(start, 1)
        torch.empty(moves, device=generator.device).uniform_(generator=generator)
        while (key := _key(generator.get_state())) in self._ends:
            torch.empty(1, device=generator.device).uniform_(generator=generator)
            moves += 1
        self._moves[start] = moves + 1
        return key


@dataclasses.dataclass
class _Stream:
    source: Source
    generator: Generator  # which has to live, so that its number stays unique
    start: Tensor
    last: int | None = None


class Generators:
    """The generators of a tape for its replay; those that a user made stay as they are.

    Args:
        streams: of the tape.
        device: of the tape.
        draws: all of the tape, in order.
        states: those that draws begin with, in order.
    """

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        draws: Iterable[Draw],
        states: Iterable[Tensor],
    ) -> None:
        default = default_generators(device)
        given = streams.generators[len(default) :]
        self._all = [*default, *(Generator(each.device) for each in given)]
        self._states = iter(states)
        self._kept = {draw.begins for draw in draws if isinstance(draw.begins, int)}
        self._ends: dict[int, Tensor] = {}

    def __getitem__(self, source: Source) -> Generator:
        return self._all[source.number]

    @contextlib.contextmanager
    def drawing(self, draws: Sequence[Draw]) -> Iterator[None]:
        """Around an operation that draws these."""
        for draw in draws:
            if isinstance(draw.begins, Tensor):
                self[draw.source].set_state(next(self._states))
            elif draw.begins is not None:
                self[draw.source].set_state(self._ends[draw.begins])
        yield
        for draw in draws:
            if draw.number in self._kept:
                self._ends[draw.number] = self[draw.source].get_state()


def states_of(draws: Iterable[Draw]) -> list[Tensor]:
    """The states that some of them begin with, in order."""
    return [draw.begins for draw in draws if isinstance(draw.begins, Tensor)]


def default_generators(device: torch.device) -> list[Generator]:
    """The CPU's, and the device's own if it has one."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    index = device.index if device.index is not None else torch.cuda.current_device()
    return [torch.default_generator, torch.cuda.default_generators[index]]


def _key(state: Tensor) -> bytes:
    return hashlib.sha256(state.numpy().tobytes()).digest()
