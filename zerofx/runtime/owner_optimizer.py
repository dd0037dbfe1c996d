"""`OwnerOptimizer`: optimizers that need whole matrices, over sharded parameters."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from zerofx.errors import ShardingError
from zerofx.runtime.handles import live_sessions
from zerofx.runtime.owners import Owned, assign_owners, from_owners, to_owners
from zerofx.runtime.params import ParamState, as_dtensor, local_tensor
from zerofx.runtime.session import Session


@dataclasses.dataclass(frozen=True)
class _Like:
    """What other ranks learn of a tensor of the state."""

    shape: torch.Size
    dtype: torch.dtype


class OwnerOptimizer(Optimizer):
    """Runs an optimizer that looks at whole parameters (Muon, Shampoo, Adafactor), unchanged.

        opt = zerofx.OwnerOptimizer(matrices, torch.optim.Muon, lr=0.02)

    Every parameter has an owner among the ranks that share its shards. In a step the owner receives
    the rows of its gradient and of its values, updates it as a single process would, and returns
    the rows. It alone holds the parameter's optimizer state, whole. Ranks own about equally many
    elements; none more than its share and one parameter.

    A step sends three times what ranks own, beside the gathers and reductions of the program, and
    holds twice that for a moment. Parameters, gradients, `zero_grad`, clipping, loss scaling,
    schedules and checkpoints are as with any optimizer. `state_dict()` shows tensors of the state
    as `DTensor`s, under the plain optimizer's names; every rank must call it.

    Args:
        params: parameters or groups of one model; sharded before the first step, not necessarily
            here.
        optimizer_class: it keeps what it remembers in `state`, parameter by parameter.
        options: of that class.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: Callable[..., Optimizer], **options: Any
    ) -> None:
        self._optimizer_class = optimizer_class
        self._options = options
        # It checks parameters and options, and completes them with its defaults.
        prototype = optimizer_class(params, **options)
        super().__init__(prototype.param_groups, prototype.defaults)

    def __getstate__(self) -> dict[str, Any]:
        mine = {"_optimizer_class": self._optimizer_class, "_options": self._options}
        return {**super().__getstate__(), **mine}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; every rank must take it.

        Raises:
            ShardingError: parameters are not sharded, or are those of several models.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not any(isinstance(param, DTensor) for param in self._params()):
            # Before sharding: a checkpoint is about to be loaded, or there is one process alone.
            self._update({p: (p.detach(), p.grad) for p in self._params() if p.grad is not None})
            return loss
        session, owners = self._owners()
        self._settle(session, owners)
        ready = [(state, owner) for state, owner in owners if state.param.grad is not None]
        values = [_owned(state, state.shard, owner) for state, owner in ready]
        grads = [
            _owned(state, local_tensor(cast(Tensor, state.param.grad)).contiguous(), owner)
            for state, owner in ready
        ]
        wholes = _exchange(session, to_owners, "parameters and gradients", values + grads)
        whole_values, whole_grads = wholes[: len(ready)], wholes[len(ready) :]
        mine = {
            state.param: (whole, grad.to(whole.dtype))
            for (state, owner), whole, grad in zip(ready, whole_values, whole_grads, strict=True)
            if owner == session.axes.shard.rank
        }
        self._update(mine)
        for state, _ in ready:
            self.state.setdefault(state.param, {})  # alike on all ranks, owners or not
        _exchange(session, from_owners, "parameters", whole_values, values)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's; tensors of the state are `DTensor`s. Every rank must call it."""
        if not any(isinstance(param, DTensor) for param in self.state):
            return super().state_dict()
        whole = self.state
        self.state = self._spread()
        try:
            return super().state_dict()
        finally:
            self.state = whole

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _owners(self) -> tuple[Session, list[tuple[ParamState, int]]]:
        """The model, and its parameters with their owners."""
        params = self._params()
        known = {id(state.param): state for session in live_sessions() for state in session.states}
        strange = [str(tuple(param.shape)) for param in params if id(param) not in known]
        sessions = {known[id(param)].domain.session for param in params if id(param) in known}
        if strange or len(sessions) != 1:
            raise ShardingError(
                "OwnerOptimizer steps over parameters that are not those of one sharded model",
                "run a forward of the compiled model first, or zerofx.shard(model, config); make "
                "one OwnerOptimizer for each model",
                [f"a plain parameter of shape {shape}" for shape in strange],
            )
        session = sessions.pop()
        sizes = [[param.numel() for param in group["params"]] for group in self.param_groups]
        owners = assign_owners(sizes, session.axes.shard.size)
        places = [owner for group in owners for owner in group]
        return session, [(known[id(p)], owner) for p, owner in zip(params, places, strict=True)]

    def _update(self, mine: dict[Tensor, tuple[Tensor, Tensor]]) -> None:
        """One step of the optimizer over whole values and gradients, by parameter."""
        if not mine:
            return
        groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            wholes = [mine[param][0] for param in group["params"] if param in mine]
            options = {key: value for key, value in group.items() if key != "param_names"}
            groups.append({**options, "params": wholes})
        for whole, grad in mine.values():
            whole.grad = grad
        inner = self._optimizer_class(groups, **self._options)
        for param, (whole, _) in mine.items():
            inner.state[whole] = self.state[param]
        inner.step()
        for param, (whole, _) in mine.items():
            self.state[param] = inner.state[whole]
            whole.grad = None

    def _settle(self, session: Session, owners: Sequence[tuple[ParamState, int]]) -> None:
        """Give state that was loaded, or cut when the model was sharded, to the owners alone."""
        found = [
            (state.param, key, _lies(value, owner))
            for state, owner in owners
            for key, value in self.state.get(state.param, {}).items()
            if isinstance(value, DTensor)
        ]
        if found:
            tensors = [tensor for _, _, tensor in found]
            wholes = _exchange(session, to_owners, "optimizer state", tensors)
            for (param, key, _), whole in zip(found, wholes, strict=True):
                self.state[param][key] = whole
        for state, owner in owners:
            if owner != session.axes.shard.rank and state.param in self.state:
                self.state[state.param] = {}

    def _spread(self) -> collections.defaultdict[Any, Any]:
        """The state as all ranks may show it: tensors as `DTensor`s."""
        session, owners = self._owners()
        self._settle(session, owners)
        comm, split = session.axes.shard, session.sharded.layout.sharded
        told: list[Any] = [None] * comm.size
        mine = {
            place: {key: _described(value) for key, value in self.state[state.param].items()}
            for place, (state, owner) in enumerate(owners)
            if owner == comm.rank and state.param in self.state
        }
        dist.all_gather_object(told, mine, group=comm.group)
        spread = collections.defaultdict(dict, {param: {} for param in self.state})
        wholes, tensors, shown = list[Tensor](), list[Owned](), list[tuple[Any, str, torch.Size]]()
        for owner, entries in enumerate(told):
            for place, described in entries.items():
                param = owners[place][0].param
                for key, value in described.items():
                    spread[param][key] = value
                    if isinstance(value, _Like):
                        local = _empty_rows(value, session, split)
                        tensors.append(Owned(local, value.shape, split, owner))
                        wholes.append(self.state[param].get(key, local))
                        shown.append((param, key, value.shape))
        locals_ = _exchange(session, from_owners, "optimizer state", wholes, tensors)
        for (param, key, shape), local in zip(shown, locals_, strict=True):
            spread[param][key] = as_dtensor(local, shape, session.sharded)
        return spread


def _exchange(session: Session, start: Any, what: str, *tensors: Sequence[Any]) -> list[Tensor]:
    comm = session.axes.shard
    tag = session.journal.record("exchange", f"{len(tensors[-1])} {what} with owners")
    return session.wait(start(*tensors, comm, tag))


def _owned(state: ParamState, local: Tensor, owner: int) -> Owned:
    return Owned(local, state.spec.shape, state.spec.layout.sharded, owner)


def _lies(value: DTensor, owner: int) -> Owned:
    split = isinstance(value.placements[-1], Shard)
    return Owned(local_tensor(value).contiguous(), value.shape, split, owner)


def _described(value: Any) -> Any:
    """Large tensors by their kind; anything else, counts of steps for example, as it is."""
    many = isinstance(value, Tensor) and value.ndim > 0
    return _Like(value.shape, value.dtype) if many else value


def _empty_rows(like: _Like, session: Session, split: bool) -> Tensor:
    whole = torch.empty(like.shape, dtype=like.dtype, device="meta")
    if split:
        parts = whole.chunk(session.axes.shard.size)
        whole = (
            parts[session.axes.shard.rank] if session.axes.shard.rank < len(parts) else whole[:0]
        )
    return torch.empty_like(whole, device=session.device)
