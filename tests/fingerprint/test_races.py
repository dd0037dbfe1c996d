"""A collective that ends just when patience with it does."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch.distributed as dist

from zerofx.runtime.watch import Watch


class _JustEnded(dist.Work):
    """What gloo's work does: `wait` gives up, and then the work ends."""

    def __init__(self, failure: str = "") -> None:
        super().__init__()
        self.ended = False
        self.failure = failure

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self) -> bool:
        return self.ended


def _watch() -> Watch:
    journal: Any = None  # it is asked only by the thread, which does not run here
    return Watch(journal, 0.1)


def test_it_counts() -> None:
    _watch().wait(_JustEnded())


def test_its_own_failure_is_told() -> None:
    for failure in ("connection closed by peer", "Timed out waiting 1000ms for recv operation"):
        with pytest.raises(RuntimeError, match=failure):
            _watch().wait(_JustEnded(failure))
