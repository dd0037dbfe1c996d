"""Full values that `zerofx.unshard` gave go back to the shards, where any rank edited them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
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
    """A parameter when its value was handed out: this rank's rows, and a digest of the whole."""

    rows: Tensor
    digest: Tensor

    @classmethod
    def of(cls, state: ParamState, whole: Tensor) -> Before:
        """What is there now."""
        return cls(state.shard.detach().clone(), _digest(whole))


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
    digests = [_digest(whole) for whole in wholes.values()]
    edited = [
        not same_bits(before[name].rows, local_tensor(rows[name]))
        or not torch.equal(before[name].digest, digest)
        for name, digest in zip(states, digests, strict=True)
    ]
    if session.world.size > 1:
        edited, differ = _compared(session, edited, torch.stack(digests))
        own = [name for name, *both in zip(states, edited, differ, strict=True) if all(both)]
        if own:
            raise UnsupportedError(
                "ranks edited values of zerofx.unshard differently, and would keep rows of each",
                "edit them alike on all ranks, or follow `if rank == 0:` by "
                "torch.distributed.broadcast(values[name], 0) on all",
                own,
            )
    for (name, state), is_edited in zip(states.items(), edited, strict=True):
        if is_edited:
            # Of the shard itself autograd would keep count, and speak before zerofx does.
            state.param.copy_(rows[name])


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


def _compared(
    session: Session, edited: Sequence[bool], digests: Tensor
) -> tuple[list[bool], list[bool]]:
    """Of each value whether any rank edited it, and whether ranks have it differently."""
    mine = torch.cat([torch.tensor(edited, device=digests.device), digests, digests.square()])
    tag = session.journal.record("all_reduce", "edited values")
    (means,) = session.wait(all_reduce_mean([mine.double()], session.world, tag))
    anywhere, mean, square = means.chunk(3)
    # The variance of whole numbers below 2**16 is 0, but for rounding, or 1 / (2 * ranks) at least.
    differ = square - mean.square() > 0.25 / session.world.size
    return (anywhere > 0).tolist(), differ.tolist()


def _digest(value: Tensor) -> Tensor:
    """A whole number below 2**16 of the bytes and their places."""
    flat = as_bytes(value)
    columns = F.pad(flat, (0, -len(flat) % 251)).view(-1, 251).sum(0, dtype=torch.int64)
    return (columns * torch.arange(1, 252, device=columns.device)).sum() % 2**16
