"""`RollCall`: which ranks still answer.

Ranks talk through the process group's store, which does not need the connections of collectives.
A rank asks, and every rank's watch answers from a thread of its own, whatever its main thread does.
Who stays silent is gone: the first rank to find that declares it, and waits until the others know,
for the store may go away with the rank that holds it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from zerofx.errors import RankGoneError

POLL_SECONDS = 0.05
"""Between two looks at the store."""

REMEDY = (
    "see how that process ended (its log, torchrun's summary, the kernel's log for memory), and "
    "start all ranks again from the last checkpoint"
)


class RollCall:
    """Questions and answers of the ranks of one sharded model.

    Args:
        key: prefix in the store, the same on all ranks.
        store: the process group's store.
        rank: of this process.
        peers: the other ranks; numbers are global.
    """

    def __init__(self, key: str, store: dist.Store, rank: int, peers: Iterable[int]) -> None:
        self._key = key
        self._store = store
        self._rank = rank
        self._peers = list(peers)
        self._answered = 0

    def ask(self) -> int:
        """Ask all ranks for their records; returns the question's number."""
        return self._store.add(f"{self._key}/asked", 1)

    def is_asked(self) -> bool:
        """Whether there is a question since the last answer."""
        return bool(self._peers) and self._question() > self._answered

    def answer(self, record: dict[str, Any]) -> None:
        """Answer all questions so far."""
        self._answered = self._question()
        answer = {"answers": self._answered, **record}
        self._store.set(f"{self._key}/{self._rank}", json.dumps(answer))

    def answers(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The last record of each other rank that ever answered."""
        for peer in self._peers:
            key = f"{self._key}/{peer}"
            if self._store.check([key]):
                yield peer, json.loads(self._store.get(key).decode())

    def silent(self, question: int) -> list[int]:
        """Other ranks that have not answered yet."""
        there = {peer for peer, answer in self.answers() if answer["answers"] >= question}
        return [peer for peer in self._peers if peer not in there]

    def declare_gone(self, ranks: Iterable[int], silence: float) -> None:
        """Tell all ranks that `ranks` have not answered for `silence` seconds."""
        self._store.set(f"{self._key}/gone", json.dumps([list(ranks), silence]))

    def refuse_gone(self) -> None:
        """Note for the others that this rank knows.

        Raises:
            RankGoneError: ranks were declared gone.
        """
        if not self._peers or not self._store.check([f"{self._key}/gone"]):
            return
        ranks, silence = json.loads(self._store.get(f"{self._key}/gone").decode())
        self._store.set(f"{self._key}/knows/{self._rank}", "")
        are = named_ranks(ranks, "is", "are")
        raise RankGoneError(f"{are} gone: no answer for {silence:g} s", REMEDY, ranks)

    def wait_until_known(self, gone: Iterable[int], seconds: float) -> None:
        """Wait until all other ranks know of those that are gone, or for `seconds`."""
        keys = [f"{self._key}/knows/{peer}" for peer in self._peers if peer not in gone]
        give_up = time.monotonic() + seconds
        while keys and not self._store.check(keys) and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS)

    def _question(self) -> int:
        key = f"{self._key}/asked"
        return int(self._store.get(key)) if self._store.check([key]) else 0


def named_ranks(ranks: Sequence[int], one: str, many: str) -> str:
    """The subject of a sentence, with its verb."""
    names = ", ".join(map(str, ranks))
    return f"rank {names} {one}" if len(ranks) == 1 else f"ranks {names} {many}"


def holder_gone() -> RankGoneError:
    """The store does not answer: with it went the process that holds it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return RankGoneError("torchrun's agent is gone, and the process group's store", REMEDY)
    return RankGoneError(
        "rank 0 is gone, and with it the process group's store (unless another process held it)",
        REMEDY,
        (0,),
    )
