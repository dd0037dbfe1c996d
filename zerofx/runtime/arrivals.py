"""Ranks come to a place together, to a model's sharding say, and hear from each other in the store.

Nothing connects them there that would break with a process, so who waits says who has not come.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from zerofx.errors import RankGoneError
from zerofx.runtime.members import named
from zerofx.runtime.roll_call import REMEDY, named_ranks

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.25


class Arrivals:
    """Those of some ranks that came to one place.

    Args:
        key: prefix in the store, the same on all ranks.
        store: the process group's store.
        ranks: who is expected; numbers are global.
        place: what they come to, in words.
        patience: seconds after which a rank that waits says for whom.
    """

    def __init__(
        self, key: str, store: dist.Store, ranks: Sequence[int], place: str, patience: float
    ) -> None:
        self._keys = {rank: f"{key}/here/{rank}" for rank in ranks}
        self._store = store
        self._place = f"{place} of ranks {named(ranks)}"
        self._patience = patience

    def come(self, rank: int, text: str = "") -> None:
        """This rank is there, and says so much."""
        self._store.set(self._keys[rank], text)

    def all_say(self) -> list[str]:
        """What each of the ranks said when it came; raises as `hear` does."""
        return [self.hear(key) for key in self._keys.values()]

    def hear(self, key: str) -> str:
        """What another rank writes at `key` of the store, once it does.

        Raises:
            RankGoneError: ranks did not come within the time-out of the process group.
        """
        try:
            self._store.wait([key], datetime.timedelta(seconds=self._patience))
        except dist.DistStoreError:
            self._await_all_or(key)
        return self._store.get(key).decode()

    def _await_all_or(self, key: str) -> None:
        """Until all have come, or `key` is there."""
        store: Any = self._store
        start, limit, said = time.monotonic(), store.timeout.total_seconds(), False
        while not store.check([key]) and (absent := self._absent()):
            if not said:
                said = True
                _log.warning(
                    "%s not come to %s yet: late, ended, or busy with something else, with another "
                    "mesh perhaps",
                    named_ranks(absent, "has", "have"),
                    self._place,
                )
            if time.monotonic() - start + self._patience > limit:
                raise RankGoneError(
                    f"{named_ranks(absent, 'did', 'did')} not come to {self._place} in {limit:g} s",
                    REMEDY,
                    absent,
                )
            time.sleep(_POLL_SECONDS)

    def _absent(self) -> list[int]:
        return [rank for rank, here in self._keys.items() if not self._store.check([here])]
