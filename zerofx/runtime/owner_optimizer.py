"""`OwnerOptimizer`: optimizers that need whole matrices, over sharded parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerofx.errors import ShardingError
from zerofx.runtime.comm import Comm
from zerofx.runtime.handles import states_by_param
from zerofx.runtime.owner_options import Written, changes, everyones, memory_of, merged, seen, tell
from zerofx.runtime.owner_probe import looks_at_others
from zerofx.runtime.owner_state import settle, spread
from zerofx.runtime.owners import Owned, assign_owners, exchange, from_owners, to_owners
from zerofx.runtime.parameter import local_tensor
from zerofx.runtime.params import PART, ParamState, asks_for_losses, params_of
from zerofx.runtime.session import Session


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
        optimizer_class: it keeps what it remembers in `state`, parameter by parameter, or under
            other keys of `state` and in `param_groups`, where all owners write the same.
        options: of that class.

    Raises:
        ShardingError: it is no class of optimizers, or one whose steps call for losses.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: Callable[..., Optimizer], **options: Any
    ) -> None:
        _refuse_class(optimizer_class)
        self._optimizer_class = optimizer_class
        self._options = options
        # It checks parameters and options, and completes them with its defaults.
        prototype = optimizer_class(params, **options)
        super().__init__(prototype.param_groups, prototype.defaults)
        self._writes: bool | None = None  # to its groups: the first step tells
        self._places: dict[Tensor, int] = {}  # owners of parameters, which have their state

    def __getstate__(self) -> dict[str, Any]:
        mine = {name: vars(self)[name] for name in ("_optimizer_class", "_options", "_places")}
        return {**super().__getstate__(), **mine, "_writes": None}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; every rank must take it.

        Raises:
            ShardingError: parameters are not sharded, or are those of several models, or parts of
                `TensorParallel`; or the optimizer does not treat each parameter by itself.
        """
        self._refuse_parts()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not any(isinstance(param, DTensor) for param in params_of(self)):
            # Before sharding: a checkpoint is about to be loaded, or there is one process alone.
            plain = {p: (p.detach(), p.grad) for p in params_of(self) if p.grad is not None}
            if plain:
                self._take_over([self._update(plain)])
            return loss
        session, owners = self._owners()
        settle(self.state, session, owners)
        ready = [(state, owner) for state, owner in owners if state.param.grad is not None]
        values = [_owned(state, state.shard, owner) for state, owner in ready]
        grads = [
            _owned(state, local_tensor(cast(Tensor, state.param.grad)).contiguous(), owner)
            for state, owner in ready
        ]
        wholes = exchange(session, to_owners, "parameters and gradients", values + grads)
        whole_values, whole_grads = wholes[: len(ready)], wholes[len(ready) :]
        mine: dict[Tensor, tuple[Tensor, Tensor]] = {
            state.param: (whole, grad.to(whole.dtype))
            for (state, owner), whole, grad in zip(ready, whole_values, whole_grads, strict=True)
            if owner == session.axes.shard.rank
        }
        self._step_over(mine, session.axes.shard)
        for state, _ in ready:
            self.state.setdefault(state.param, {})  # alike on all ranks, owners or not
        exchange(session, from_owners, "parameters", whole_values, values)
        return loss

    def _step_over(self, mine: dict[Tensor, tuple[Tensor, Tensor]], comm: Comm) -> None:
        """Update what this rank owns; ranks that are told what was written hear of errors."""
        # Zeros, of which a step makes state before a checkpoint is loaded, tell nothing.
        tells = self._writes is None and any(bool(grad.any()) for _, grad in mine.values())
        joint = tells and self._looks_at_others(mine)
        wrote = Written([None] * (len(self.param_groups) + 1), [], joint)
        try:
            if mine and not joint:
                wrote = self._update(mine)
        except Exception as error:
            if self._writes is not False:
                said = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
                tell(dataclasses.replace(wrote, error=said), comm)
            raise
        self._share(dataclasses.replace(wrote, tells=tells), comm)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer itself loads it: some keep values in dtypes of their own."""
        given: list[dict[str, Any]] = []

        def take_over(_: Optimizer) -> None:
            groups = [_options_of(group) for group in self.param_groups]
            inner = self._inner(groups)
            inner.load_state_dict(given[-1])
            self.state = inner.state

        # After hooks of others that change it, and before those that look at what came of it.
        before = self.register_load_state_dict_pre_hook(lambda _, state: given.append(state))
        after = self.register_load_state_dict_post_hook(take_over, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's; tensors of the state are `DTensor`s. Every rank must call it."""
        if not any(isinstance(param, DTensor) for param in self.state):
            return super().state_dict()
        session, owners = self._owners()
        settle(self.state, session, owners)
        whole, self.state = self.state, spread(self.state, session, owners)
        try:
            return super().state_dict()
        finally:
            self.state = whole

    def _refuse_parts(self) -> None:
        parts = [param for param in params_of(self) if getattr(param, PART, None) is not None]
        if parts:
            known = states_by_param()
            raise ShardingError(
                "OwnerOptimizer is for whole matrices, and TensorParallel has divided these",
                "give it the parameters that ranks hold whole, and these to an optimizer that "
                "works element by element",
                [known[id(p)].spec.name if id(p) in known else str(tuple(p.shape)) for p in parts],
            )

    def _owners(self) -> tuple[Session, list[tuple[ParamState, int]]]:
        """The model, and its parameters with their owners."""
        params = params_of(self)
        known = states_by_param()
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
        self._assign(session.axes.shard.size)
        return session, [(known[id(param)], self._places[param]) for param in params]

    def _assign(self, num_ranks: int) -> None:
        """Give owners to parameters that have none; others keep theirs, who have their state."""
        owned = [0] * num_ranks
        for param in params_of(self):
            if param in self._places:
                owned[self._places[param]] += param.numel()
        new = [[p for p in group["params"] if p not in self._places] for group in self.param_groups]
        owners = assign_owners([[p.numel() for p in group] for group in new], num_ranks, owned)
        for group, places in zip(new, owners, strict=True):
            self._places.update(zip(group, places, strict=True))

    def _share(self, mine: Written, comm: Comm) -> None:
        """Take over what owners wrote for all parameters, on all ranks; few optimizers do."""
        if self._writes is False:
            if mine.anything:
                merged([mine])
                raise ShardingError(
                    "the optimizer wrote to its groups, or to its state under keys that are no "
                    "parameters, and did not in its first step",
                    "let it write there in its first step too: OwnerOptimizer asks then",
                    sorted({str(key) for entries in mine.entries for key in entries or ()}),
                )
            return
        told = tell(mine, comm)
        if any(each.tells for each in told):
            self._writes = any(each.anything for each in told)
        self._take_over(told)

    def _take_over(self, told: list[Written]) -> None:
        for entries, written in zip((*self.param_groups, self.state), merged(told), strict=True):
            entries.update(written)

    def _inner(self, groups: list[dict[str, Any]]) -> Optimizer:
        return self._optimizer_class(groups, **self._options)

    def _looks_at_others(self, mine: dict[Tensor, tuple[Tensor, Tensor]]) -> bool:
        """Whether one of these is updated by what others are; a small matrix is asked."""
        param = min(mine, key=lambda param: (param.ndim < 2, param.numel()))
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        return looks_at_others(self._inner, _options_of(group), *mine[param])

    def _update(self, mine: dict[Tensor, tuple[Tensor, Tensor]]) -> Written:
        """One step of the optimizer over whole values and gradients, by parameter."""
        groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            wholes = [mine[param][0] for param in group["params"] if param in mine]
            groups.append({**_options_of(group), "params": wholes})
        for whole, grad in mine.values():
            whole.grad = grad
        inner = self._inner(groups)
        inner.state.update(everyones(self.state))
        for param, (whole, _) in mine.items():
            inner.state[whole] = self.state[param]
        params = [whole for whole, _ in mine.values()]
        before = [seen(group, params) for group in inner.param_groups]
        state, memory = seen(inner.state, params), seen(memory_of(inner), params)
        inner.step()
        pairs = zip(before, inner.param_groups, strict=True)
        wrote = [changes(old, new, params) if new["params"] else None for old, new in pairs]
        wrote.append(changes(state, inner.state, params))
        for param, (whole, _) in mine.items():
            self.state[param] = inner.state.pop(whole, {})
            whole.grad = None
        lost = [*changes(memory, memory_of(inner), params)]
        if any(isinstance(key, Tensor) for key in inner.state):
            lost.append("state of tensors that are no parameters")
        return Written(wrote, lost)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "param_names"}


def _owned(state: ParamState, local: Tensor, owner: int) -> Owned:
    return Owned(local, state.spec.shape, state.spec.layout.sharded, owner)


def _refuse_class(given: Any) -> None:
    name = getattr(given, "__name__", repr(given))
    if isinstance(given, Optimizer) or not callable(given):
        raise ShardingError(
            f"OwnerOptimizer was given {name}, which makes no optimizer",
            "give it the class, and its options: OwnerOptimizer(params, torch.optim.Muon, lr=0.02)",
        )
    if asks_for_losses(given):
        raise ShardingError(
            f"OwnerOptimizer cannot run {name}: a step of it asks for losses of other parameters",
            f"use {name}(model.parameters()) itself, which keeps whole vectors on every rank",
        )
