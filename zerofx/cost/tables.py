"""What collectives cost on one machine: measured once, kept in a file, the same on all ranks."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from zerofx.cost.comm import Algorithm, Algorithms
from zerofx.cost.link import Link

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

_KNOWN: dict[str, tuple[str, ...]] = {
    "collective": get_args(Collective),
    "algorithm": get_args(Algorithm),
    "dtype": ("float32", "bfloat16", "uint8"),
}
"""What entries may say."""

_TYPICAL = 4 << 20
_LATENCY_SHARE = 0.05
_LEAST, MOST_BUCKET_BYTES = 1 << 20, 16 << 20


@dataclasses.dataclass(frozen=True)
class CommCost:
    """Seconds of one collective by one algorithm: `alpha + beta * bytes`.

    Attributes:
        collective: what it does.
        algorithm: which c10d calls do it.
        dtype: of the values, as torch names it; reductions add in it.
        alpha: seconds before the first byte.
        beta: seconds for each byte that a rank sends.
    """

    collective: Collective
    algorithm: Algorithm
    dtype: str
    alpha: float
    beta: float

    def seconds(self, num_bytes: float) -> float:
        """Time of a transfer in which each rank sends `num_bytes`."""
        return self.alpha + self.beta * num_bytes


@dataclasses.dataclass(frozen=True)
class CommTable:
    """Costs of all collectives for ranks that lie alike.

    Attributes:
        topology: see `topology`.
        costs: one entry for each collective, algorithm and dtype.
        measured: whether they were, and not computed by a model of the machine.
    """

    topology: str
    costs: tuple[CommCost, ...]
    measured: bool = True

    def best(self, collective: Literal["all_gather", "reduce_scatter"]) -> CommCost:
        """The cheapest fp32 entry for a typical bucket."""
        known = [c for c in self.costs if c.collective == collective and c.dtype == "float32"]
        return min(known, key=lambda cost: cost.seconds(_TYPICAL))

    def algorithms(self) -> Algorithms:
        """The cheapest for a typical bucket."""
        return Algorithms(self.best("all_gather").algorithm, self.best("reduce_scatter").algorithm)

    def chosen(self) -> dict[Collective, Algorithm]:
        """By which algorithm each collective goes."""
        best = self.algorithms()
        return {
            "all_gather": best.all_gather,
            "reduce_scatter": best.reduce_scatter,
            "all_reduce": "native",
            "all_to_all": "native" if best.untagged else "point_to_point",
        }

    def links(self) -> dict[Collective, Link]:
        """The link as each collective finds it that is known."""
        chosen = self.chosen()
        return {
            cost.collective: Link(1 / cost.beta if cost.beta else math.inf, cost.alpha)
            for cost in reversed(self.costs)  # fp32 comes first
            if cost.algorithm == chosen[cost.collective]
        }

    def bucket_bytes(self) -> int:
        """Full size that takes the link twenty times its latency; between 1 and 16 MiB."""
        cost = self.best("all_gather")
        if cost.beta <= 0:
            return MOST_BUCKET_BYTES
        wanted = cost.alpha / cost.beta / _LATENCY_SHARE
        return int(min(max(wanted, _LEAST), MOST_BUCKET_BYTES))

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def loads(text: str) -> CommTable:
    """Read what `dumps` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        costs = tuple(_checked(CommCost(**cost)) for cost in data["costs"])
        table = CommTable(str(data["topology"]), costs, bool(data.get("measured", True)))
        table.algorithms()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no table of collectives: {error}") from error
    return table


def _checked(cost: CommCost) -> CommCost:
    """`cost`, if it may be one."""
    for name, known in _KNOWN.items():
        if getattr(cost, name) not in known:
            raise ValueError(f"{name} {getattr(cost, name)!r} is none of {', '.join(known)}")
    for name in ("alpha", "beta"):
        if not 0 <= getattr(cost, name) < math.inf:
            raise ValueError(f"{name} of {cost.collective} is {getattr(cost, name)!r}")
    return cost


def topology(backend: str, device_type: str, size: int, node_size: int, torch: str) -> str:
    """Name of all groups that one table serves, such as `gloo-cpu-2x4-torch2.13`.

    Args:
        backend: as c10d names it.
        device_type: of the tensors.
        size: ranks of the group.
        node_size: how many of them share a node.
        torch: version.
    """
    release = ".".join(torch.split(".")[:2])
    return f"{backend}-{device_type}-{size // node_size}x{node_size}-torch{release}"


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Alpha and beta, both at least 0, with the least relative errors.

    Args:
        points: bytes and seconds of transfers, at least one.
    """
    sizes, seconds = np.array(points, dtype=float).T
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)
    if alpha < 0:
        ratios = sizes / seconds
        alpha, beta = 0.0, ratios.sum() / (ratios**2).sum()
    if beta < 0:
        inverse = 1 / seconds
        alpha, beta = inverse.sum() / (inverse**2).sum(), 0.0
    return float(alpha), float(beta)
