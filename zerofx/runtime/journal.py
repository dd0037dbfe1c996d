"""The order in which this rank issued collectives, and what to say when ranks disagree.

Every collective extends a running checksum. Point-to-point messages carry it as their tag, so that
ranks out of step never mix values: they hang. A rank that waits too long publishes its journal
through the process group's store, reads the others' and turns the hang into a diff. Where the
backend's own collectives carry no tag, the checksum is compared once a step, one step late.
"""

from __future__ import annotations

import collections
import json
import zlib

import torch.distributed as dist

from zerofx.errors import DivergedError

_KEPT = 4096


class Journal:
    """Collectives of one sharded model on this rank.

    Args:
        key: prefix in the store, the same on all ranks.
        store: the process group's store.
        rank: global rank.
        num_ranks: number of global ranks.
    """

    def __init__(self, key: str, store: dist.Store, rank: int, num_ranks: int) -> None:
        self._key = key
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._count = 0
        self._checksum = 0
        self._recent: collections.deque[str] = collections.deque(maxlen=_KEPT)
        self._steps = 0

    def record(self, kind: str, name: str) -> int:
        """Note a collective; returns the tag for its messages (31 bits)."""
        entry = f"{kind} {name}"
        self._recent.append(entry)
        self._count += 1
        self._checksum = zlib.crc32(entry.encode(), self._checksum)
        return self._checksum & 0x7FFFFFFF

    def compare_plans(self, plan: str) -> None:
        """Publish `plan` and compare it with the next rank's; blocks until that rank publishes.

        Raises:
            DivergedError: the plans differ; the differing lines are listed.
        """
        self._store.set(f"{self._key}/plan/{self._rank}", plan)
        peer = (self._rank + 1) % self._num_ranks
        theirs = self._store.get(f"{self._key}/plan/{peer}").decode()
        if theirs != plan:
            raise DivergedError(
                f"ranks {self._rank} and {peer} shard different models",
                "build the same model, in the same order and with the same options, on every rank",
                _diff(plan.splitlines(), theirs.splitlines(), self._rank, peer),
            )

    def check_step(self) -> None:
        """Publish this step's checksum and compare the next rank's of the step before.

        Raises:
            DivergedError: the ranks issued different collectives.
        """
        self._steps += 1
        mine = f"{self._count} {self._checksum}"
        self._store.set(f"{self._key}/step/{self._rank}/{self._steps % 4}", f"{self._steps} {mine}")
        peer = (self._rank + 1) % self._num_ranks
        key = f"{self._key}/step/{peer}/{self._steps % 4}"
        if not self._store.check([key]):
            return
        step, count, checksum = self._store.get(key).decode().split()
        if int(step) == self._steps and f"{count} {checksum}" != mine:
            self.explain_hang()
            raise DivergedError(
                f"ranks {self._rank} and {peer} issued different collectives by step {step}",
                "run the same layers in the same order on every rank",
            )

    def explain_hang(self) -> None:
        """Compare journals with every rank that also published one.

        Returns if nothing differs: the others are merely late.

        Raises:
            DivergedError: another rank issued other collectives; the first differences are listed.
        """
        record = json.dumps({"count": self._count, "recent": list(self._recent)})
        self._store.set(f"{self._key}/hang/{self._rank}", record)
        for peer in range(self._num_ranks):
            key = f"{self._key}/hang/{peer}"
            if peer == self._rank or not self._store.check([key]):
                continue
            theirs = json.loads(self._store.get(key).decode())
            difference = _first_difference(
                list(self._recent), self._count, theirs["recent"], theirs["count"]
            )
            if difference is not None:
                position, mine, other = difference
                raise DivergedError(
                    f"ranks {self._rank} and {peer} issue different collectives from number "
                    f"{position} on",
                    "every rank must run the same modules in the same order; look for control flow "
                    "that depends on the rank or on its data",
                    _diff(mine, other, self._rank, peer),
                )


def _first_difference(
    mine: list[str], my_count: int, theirs: list[str], their_count: int
) -> tuple[int, list[str], list[str]] | None:
    """Position and what follows on both sides, up to five entries; `None` if one is a prefix."""
    start = max(my_count - len(mine), their_count - len(theirs))
    stop = min(my_count, their_count)
    ours = mine[len(mine) - (my_count - start) :]
    other = theirs[len(theirs) - (their_count - start) :]
    for offset in range(stop - start):
        if ours[offset] != other[offset]:
            return start + offset, ours[offset : offset + 5], other[offset : offset + 5]
    return None


def _diff(mine: list[str], theirs: list[str], rank: int, peer: int) -> list[str]:
    ours_only = [line for line in mine if line not in theirs]
    theirs_only = [line for line in theirs if line not in mine]
    if not ours_only and not theirs_only:
        ours_only, theirs_only = mine, theirs
    return [f"rank {rank}: {line}" for line in ours_only[:8]] + [
        f"rank {peer}: {line}" for line in theirs_only[:8]
    ]
