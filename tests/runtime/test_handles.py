"""The table of domains, while models that nobody holds any more are collected."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

from zerofx.runtime import handles


class _Cycle:
    """Lives until it is collected, as a sharded model does."""

    def __init__(self) -> None:
        self.me = self


def test_domains_may_go_while_they_are_listed() -> None:
    table: Any = WeakValueDictionary()
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with patch.object(handles, "_domains", table):
            for _ in range(30):
                for handle in range(50):
                    table[handle] = _Cycle()
                handles.live_domains()
    finally:
        gc.set_threshold(*before)
