"""The order in which this rank issued collectives, and what to say when ranks disagree.

Every collective extends a running checksum. Point-to-point messages carry it as their tag, so that
ranks out of step never mix values: they hang. A rank that waits too long publishes its journal
through the process group's store, asks the others for theirs and turns the hang into a diff (see
`zerofx.runtime.watch`). Where a backend's own collectives carry no tag, the checksum is compared
once a step, one step late.
"""

from __future__ import annotations

import collections
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from zerofx.errors import DivergedError, RankGoneError, ZeroFxError
from zerofx.runtime.arrivals import Arrivals
from zerofx.runtime.differences import diff, first_difference, in_order
from zerofx.runtime.roll_call import POLL_SECONDS, RollCall

_KEPT = 4096
_SLOTS = 4
_ANSWER_SECONDS = 10.0
_SETTLE_SECONDS = 2.0
_RANK_REMEDY = (
    "every rank must run the same modules in the same order; look for control flow that depends "
    "on the rank or on its data, and for a buffer that one rank alone writes before an evaluation. "
    "Where ranks see inputs of other sizes, one may have compiled a graph again that breaks "
    "elsewhere: dynamic=True in torch.compile, padding, or a DataLoader's drop_last=True helps"
)


class Journal:
    """Collectives of one sharded model on this rank. Threads may share it.

    Attributes:
        roll_call: how ranks ask for each other's journals.

    Args:
        key: prefix in the store, the same on all ranks.
        store: the process group's store.
        rank: of this process.
        ranks: of all processes that hold the model, ascending; numbers are global.
        passes: names of the passes that users added, which may be at fault.
        origin: the same on all ranks; messages of models of another one do not meet.
        patience: seconds after which a rank that waits for others to come says for whom.
    """

    def __init__(
        self,
        key: str,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        passes: Sequence[str],
        origin: str,
        patience: float,
    ) -> None:
        self._key = key
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._others = [peer for peer in ranks if peer != rank]
        self._lock = threading.Lock()
        self._count = 0
        self._checksum = zlib.crc32(origin.encode())
        self._recent: collections.deque[str] = collections.deque(maxlen=_KEPT)
        self._plans = 0
        self._decided: dict[str, str] = {}
        self._steps: collections.deque[str] = collections.deque(maxlen=2)
        self._num_steps = 0
        self._drops = 0
        self._closed: ZeroFxError | None = None
        self._question = 0
        self.roll_call = RollCall(f"{key}/hang", store, rank, self._others)
        self._arrivals = Arrivals(key, store, ranks, "the sharding of a model", patience)
        self._arrivals.come(rank)
        suspects = f", the model's or that of the added passes {', '.join(passes)}"
        self._remedy = _RANK_REMEDY + (suspects if passes else "")

    def record(self, kind: str, name: str) -> int:
        """Note a collective; returns the tag for its messages (31 bits).

        Raises:
            ZeroFxError: the journal was closed.
        """
        if self._closed is not None:
            raise self._closed
        entry = f"{kind} of {name}"
        with self._lock:
            self._recent.append(entry)
            self._count += 1
            self._checksum = zlib.crc32(entry.encode(), self._checksum)
            return self._checksum & 0x7FFFFFFF

    def close(self, error: ZeroFxError) -> None:
        """This rank is out of step: `error` takes the place of every further collective."""
        self._closed = error

    def drop_step(self, where: str, seconds: float) -> list[int]:
        """This rank drops a step midway; returns the ranks that do not, or elsewhere.

        Args:
            where: in the program.
            seconds: how long to wait for them.
        """
        self._drops += 1
        key = f"{self._key}/dropped{self._drops}"
        with self._lock:
            place = f"{self._count} {self._checksum} {where}"
        self._store.set(f"{key}/{self._rank}", place)
        give_up = time.monotonic() + seconds
        while self._others and time.monotonic() < give_up:
            if self._store.check([f"{key}/{peer}" for peer in self._others]):
                return [p for p in self._others if self._store.get(f"{key}/{p}").decode() != place]
            time.sleep(POLL_SECONDS)
        return [peer for peer in self._others if not self._store.check([f"{key}/{peer}"])]

    def compare_plans(self, plan: str) -> None:
        """Publish `plan` and compare it with the first rank's; blocks until all publish theirs.

        Raises:
            DivergedError: on every rank, if the plan of any differs; the differing lines are
                listed.
        """
        if not self._others:
            return
        self._plans += 1
        key = f"{self._key}/plan{self._plans}"
        self._store.set(f"{key}/{self._rank}", plan)
        odd = self._find_odd_plan(key, plan)
        if odd == (first := self._ranks[0]):
            return
        # Every rank reports the same pair, except that an odd one reports itself.
        expected = self._store.get(f"{key}/{first}").decode()
        peer = self._rank if plan != expected else odd
        theirs = self._store.get(f"{key}/{peer}").decode()
        raise DivergedError(
            f"ranks {first} and {peer} shard different models",
            "build the same model, in the same order and with the same options, on every rank; "
            "make tensors that are a rank's own (labels of its samples) attributes, not buffers",
            diff(expected.splitlines(), theirs.splitlines(), first, peer),
        )

    def from_first_rank(self, say: Callable[[], str]) -> str:
        """What the first rank says, which alone is asked; every rank must call this."""
        if not self._others:
            return say()
        self._plans += 1
        key = f"{self._key}/told{self._plans}"
        if self._rank == self._ranks[0]:
            self._store.set(key, say())
        return self._arrivals.hear(key)

    def decided_by_first_rank(self, question: str, decide: Callable[[], str]) -> str:
        """The first rank's answer to a question that all come to, each at a time of its own.

        A question is answered once: who asks again, perhaps alone, is told the same.
        """
        if question not in self._decided:
            key = f"{self._key}/decided/{question}"
            if self._rank == self._ranks[0]:
                answer = ""
                try:
                    answer = decide()
                finally:  # or the others would wait
                    self._store.set(key, answer)
            # Where the first rank failed, so does this one.
            self._decided[question] = self._store.get(key).decode() or decide()
        return self._decided[question]

    def check_step(self) -> None:
        """Publish this step's checksum and compare the next rank's of the step before.

        A rank that ends a step has heard from all others, which have thus ended the step before.

        Raises:
            DivergedError: the ranks issued different collectives.
        """
        if not self._others:
            return
        self._num_steps += 1
        step = self._num_steps
        self._steps.append(f"{step} {self._count} {self._checksum}")
        peer = self._ranks[(self._ranks.index(self._rank) + 1) % len(self._ranks)]
        key = f"{self._key}/step/{peer}/{(step - 1) % _SLOTS}"
        try:
            self._store.set(f"{self._key}/step/{self._rank}/{step % _SLOTS}", self._steps[-1])
            if step == 1 or not self._store.check([key]):
                return
            theirs = self._store.get(key).decode()
        except dist.DistNetworkError:  # the rank that holds it is done, and needs nothing of this
            return
        if theirs.split()[0] == str(step - 1) and theirs != self._steps[0]:
            self.explain_within(_ANSWER_SECONDS)
            raise DivergedError(
                f"ranks {self._rank} and {peer} issued different collectives by step {step - 1}",
                self._remedy,
            )

    def explain_hang(self) -> list[str]:
        """Ask the other ranks for their journals, and compare with those that are there.

        Returns:
            What to say of the ranks that issued fewer collectives, or did not answer the last time
            either: they are late, or stuck where zerofx cannot see it.

        Raises:
            DivergedError: another rank issued other collectives; the first differences are listed.
        """
        before, self._question = self._question, self.roll_call.ask()
        mine = self._answer()
        silent = self.roll_call.silent(before) if before else ()
        late = [f"rank {peer} does not answer" for peer in silent]
        for peer, theirs in self.roll_call.answers():
            difference = first_difference(
                mine["recent"], mine["count"], theirs["recent"], theirs["count"]
            )
            if difference is not None:
                position, ours, other = difference
                raise DivergedError(
                    f"ranks {self._rank} and {peer} issue different collectives from number "
                    f"{position} on",
                    self._remedy,
                    in_order(ours, other, self._rank, peer),
                )
            if theirs["count"] < mine["count"]:
                behind = mine["count"] - theirs["count"]
                late.append(f"rank {peer} is {behind} collectives behind, after {theirs['last']}")
        return late

    def explain_within(self, seconds: float) -> None:
        """`explain_hang` for a while: other ranks may be about to publish their journals.

        Raises:
            DivergedError: another rank issued other collectives; the first differences are listed.
        """
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            self.explain_hang()
            time.sleep(POLL_SECONDS)

    def explain_failure(self, seconds: float) -> None:
        """A collective failed: compare journals, and call the roll for so many seconds at most.

        Raises:
            DivergedError: another rank issued other collectives.
            RankGoneError: ranks did not answer; once all others know.
        """
        if not self._others:
            return
        start, question = time.monotonic(), self.roll_call.ask()
        try:
            self.explain_within(min(seconds, _SETTLE_SECONDS))
            while silent := self.roll_call.silent(question):
                self.roll_call.refuse_gone()
                if time.monotonic() > start + seconds:
                    self.roll_call.declare_gone(silent, seconds)
                time.sleep(POLL_SECONDS)
            self.roll_call.refuse_gone()
        except RankGoneError as error:
            self.roll_call.wait_until_known(error.ranks, seconds)
            raise

    def answer(self) -> None:
        """Publish this journal if another rank asked for it since the last time.

        Raises:
            RankGoneError: another rank found that ranks are gone.
        """
        self.roll_call.refuse_gone()
        if self.roll_call.is_asked():
            self._answer()

    def last(self) -> str:
        """The collective issued last."""
        with self._lock:
            return self._recent[-1] if self._recent else "nothing"

    def _find_odd_plan(self, key: str, plan: str) -> int:
        """A rank whose plan is not the first rank's, which looks for all; itself if none is."""
        first = self._ranks[0]
        if self._rank != first:
            return int(self._arrivals.hear(f"{key}/odd"))
        plans = ((peer, self._arrivals.hear(f"{key}/{peer}")) for peer in self._others)
        odd = next((peer for peer, theirs in plans if theirs != plan), first)
        self._store.set(f"{key}/odd", str(odd))
        return odd

    def _answer(self) -> dict[str, Any]:
        last = self.last()
        with self._lock:
            record = {"count": self._count, "recent": list(self._recent), "last": last}
        self.roll_call.answer(record)
        return record
