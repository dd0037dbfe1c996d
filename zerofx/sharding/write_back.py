"""Full values that `zerofx.unshard` gave go back to the shards, where any rank edited them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from zerofx.errors import UnsupportedError
from zerofx.runtime.collectives import all_reduce_mean, as_bytes
from zerofx.runtime.in_place import full
from zerofx.runtime.parameter import local_tensor
from zerofx.runtime.params import ParamState
from zerofx.runtime.session import Session
from zerofx.sharding.rows import cut, same_bits

States = Mapping[str, ParamState]


@dataclasses.dataclass(frozen=True)
class Before:
    """A parameter when its value was handed out.

    Attributes:
        rows: of this rank.
        whole: the value.
        version: how many edits of the value autograd had counted.
    """

    rows: Tensor
    whole: Tensor
    version: int

    @classmethod
    def of(cls, state: ParamState, whole: Tensor) -> Before:
        """What is there now."""
        return cls(state.shard.detach().clone(), whole, _version(whole))

    def is_touched(self, value: Tensor) -> bool:
        """Whether somebody wrote to it, if to rows of other ranks alone, or put another there."""
        return value is not self.whole or _version(value) != self.version


@torch.no_grad()
def write_back(states: States, before: Mapping[str, Before], values: Mapping[str, Tensor]) -> None:
    """Write what was edited, on any rank: looking alone is no edit of what a backward will read.

    Args:
        states: the parameters, by the names that their values have.
        before: what they were when the values were handed out.
        values: what is there now.

    Raises:
        UnsupportedError: a value has another shape or is not there, one was added that no parameter
            has, or ranks edited one differently.
    """
    _refuse_unfit(states, values)
    session = next(iter(states.values())).domain.session
    wholes = {name: full(values[name].detach()).to(session.device) for name in states}
    rows = {name: cut(wholes[name], state) for name, state in states.items()}
    edited = [not same_bits(before[name].rows, local_tensor(rows[name])) for name in states]
    if session.world.size > 1:
        touched = [before[name].is_touched(values[name]) for name in states]
        flags = torch.tensor([edited, touched], device=session.device)
        edited, touched = (_means(session, flags) > 0).tolist()
        looked_at = [any(found) for found in zip(edited, touched, strict=True)]
        own = _unlike(session, {n: wholes[n] for n in itertools.compress(states, looked_at)})
        if own:
            raise UnsupportedError(
                "ranks edited values of zerofx.unshard differently, and would keep rows of each",
                "edit them alike on all ranks, or follow `if rank == 0:` by "
                "torch.distributed.broadcast(values[name], 0) on all",
                own,
            )
    for name in itertools.compress(states, edited):
        # Of the shard itself autograd would keep count, and speak before zerofx does.
        states[name].param.copy_(rows[name])


def _refuse_unfit(states: States, values: Mapping[str, Tensor]) -> None:
    other = [f"{name} was added" for name in values.keys() - states.keys()]
    other += [f"{name} is gone" for name in states.keys() - values.keys()]
    for name in states.keys() & values.keys():
        wanted, value = list(states[name].param.shape), values[name]
        shape = list(getattr(value, "shape", [type(value).__name__]))
        if shape != wanted:
            other.append(f"{name} of shape {wanted} is now {shape}")
    if other:
        raise UnsupportedError(
            "what zerofx.unshard gave cannot be written back",
            "edit values in place, or assign values of their shapes under their names",
            sorted(other),
        )


def _unlike(session: Session, wholes: Mapping[str, Tensor]) -> list[str]:
    """Names of values that are not the same on all ranks."""
    if not wholes:
        return []
    digests = torch.stack([_digest(whole) for whole in wholes.values()])
    mean, square = _means(session, torch.stack([digests, digests.square()]))
    # The variance of whole numbers below 2**16 is 0, but for rounding, or 1 / (2 * ranks) at least.
    differ = square - mean.square() > 0.25 / session.world.size
    return list(itertools.compress(wholes, differ.tolist()))


def _means(session: Session, mine: Tensor) -> Tensor:
    tag = session.journal.record("all_reduce", "edited values")
    (means,) = session.wait(all_reduce_mean([mine.double()], session.world, tag))
    return means


def _version(value: Tensor) -> int:
    return -1 if value.is_inference() else value._version


def _digest(value: Tensor) -> Tensor:
    """A whole number below 2**16 of the bits and their places."""
    flat = as_bytes(value)
    words = flat.new_zeros(-(-len(flat) // 4 // _COLUMNS), _COLUMNS * 4)
    words.view(-1)[: len(flat)] = flat
    columns = words.view(torch.int32).sum(0, dtype=torch.int64) % _PRIME
    return (columns * torch.arange(1, _COLUMNS + 1, device=columns.device)).sum() % _PRIME


_COLUMNS, _PRIME = 251, 65521
