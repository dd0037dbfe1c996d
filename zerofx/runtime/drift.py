"""The drift monitor: how far codes are from the numbers they stand for, step by step."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.ir.error_bands import LOST, expected_error, most_error
from zerofx.ir.parcels import Codec

if TYPE_CHECKING:
    from zerofx.runtime.quantized import Kernel

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Check:
    """How codes are compared with what they stand for.

    Attributes:
        name: of the collective and its bucket.
        codec: how numbers were coded.
        params: names of the parameters.
        numels: elements of each.
        sent: makes the kernel that decodes what was coded.
        given: likewise of what came as codes; `None` if numbers were given.
    """

    name: str
    codec: Codec
    params: tuple[str, ...]
    numels: tuple[int, ...]
    sent: Callable[[], Kernel]
    given: Callable[[], Kernel] | None = None


@dataclasses.dataclass(frozen=True)
class Drift:
    """How far the codes of one bucket were from its numbers, on this rank.

    Attributes:
        name: of the collective and its bucket, such as `unshard layers.3`.
        codec: such as `int4x256`.
        error: relative L2 error, ‖decoded − given‖ / ‖given‖.
        expected: of this codec on Gaussian numbers.
        lost: of the numbers that were not zero, the part that came back as zero.
        params: relative error and lost part of each parameter.
    """

    name: str
    codec: str
    error: float
    expected: float
    lost: float
    params: Mapping[str, tuple[float, float]]

    def suspects(self) -> list[str]:
        """Parameters whose numbers the codec does not suit."""
        most = most_error(Codec.parse(self.codec))
        return [n for n, (error, lost) in self.params.items() if error > most or lost > LOST]


class DriftMonitor:
    """Compares codes with numbers, every so many times that a bucket travels.

    Args:
        every: how often; `None` is never.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._uses: collections.Counter[tuple[str, ...]] = collections.Counter()
        self._latest: dict[tuple[str, ...], Drift] = {}

    def latest(self) -> list[Drift]:
        """What was found last of each bucket, in the order in which they travelled first."""
        return list(self._latest.values())

    def look(self, check: Check, given: Sequence[Tensor], sent: Tensor) -> None:
        """Compare, if it is time to.

        It waits for the device, and takes memory for the decoded numbers in fp32.

        Args:
            check: of this bucket.
            given: numbers of each member, or the wires that came.
            sent: the wire that goes, `uint8[num, parcel_bytes]`.
        """
        if self._every is None:
            return
        key = check.name, *check.params
        number = self._uses[key]
        self._uses[key] += 1
        if number % self._every:
            return
        wanted = given if check.given is None else _decoded(check, check.given(), given[0])
        drift = self._latest[key] = _drift(check, wanted, _decoded(check, check.sent(), sent[None]))
        _log.info("%s, %s: error %.3g", drift.name, drift.codec, drift.error)
        if suspects := drift.suspects():
            _log.warning(
                "%s: %s does not suit %s: relative error %.2g, where %.2g is usual, and %.0f %% of "
                "the numbers became zero. Remedy: use a finer codec or smaller blocks, or name "
                "them in quantize_exact",
                drift.name,
                drift.codec,
                ", ".join(suspects),
                drift.error,
                drift.expected,
                100 * drift.lost,
            )


def _decoded(check: Check, kernel: Kernel, wires: Tensor) -> list[Tensor]:
    outs = [wires.new_empty(numel, dtype=torch.float32) for numel in check.numels]
    kernel([wires], outs, 0)
    return outs


def _drift(check: Check, wanted: Sequence[Tensor], found: Sequence[Tensor]) -> Drift:
    rows: list[Tensor] = []
    for given, got in zip(wanted, found, strict=True):
        exact, some = given.double(), given != 0  # squares of large numbers overflow in fp32
        off, size = (got - exact).square().sum(), exact.square().sum()
        rows.append(torch.stack([off, size, (some & (got == 0)).sum(), some.sum()]))
    # One wait for the device.
    table = torch.stack(rows).tolist()
    shares = [_shares(row) for row in table]
    error, lost = _shares([sum(column) for column in zip(*table, strict=True)])
    by_param = dict(zip(check.params, shares, strict=True))
    expected = expected_error(check.codec)
    return Drift(check.name, check.codec.name, error, expected, lost, by_param)


def _shares(row: Sequence[float]) -> tuple[float, float]:
    off, size, zeros, count = row
    return (off / size) ** 0.5 if size else 0.0, zeros / count if count else 0.0
