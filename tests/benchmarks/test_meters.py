"""Meters that read what torch and the kernel write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.meters import interface_bytes, peak_bytes, sent_bytes

DEV = """Inter-|   Receive                            |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo: 11 1 0 0 0 0 0 0 22 1 0 0 0 0 0 0
  eth0:33 1 0 0 0 0 0 0 44 1 0 0 0 0 0 0
"""


def test_sent_bytes() -> None:
    assert sent_bytes(DEV, "lo") == 22
    assert sent_bytes(DEV, "eth0") == 44
    with pytest.raises(ValueError, match="'eth1'"):
        sent_bytes(DEV, "eth1")


def test_this_machine_has_a_loopback() -> None:
    assert interface_bytes("lo") >= 0


@pytest.mark.filterwarnings("ignore:.*profiler.*")
def test_peak_counts_what_was_there_and_what_came() -> None:
    mebibyte = 2**20

    def train(mark: Callable[[], None]) -> None:
        torch.empty(9 * mebibyte, dtype=torch.uint8)  # before the mark, and gone
        kept = torch.empty(3 * mebibyte, dtype=torch.uint8)
        mark()
        extra = torch.empty(2 * mebibyte, dtype=torch.uint8)
        del extra
        extra = torch.empty(mebibyte, dtype=torch.uint8)
        assert kept.numel() > extra.numel()

    peak, start = peak_bytes(train)
    assert start == 3 * mebibyte
    assert peak == 5 * mebibyte
