"""State of a model and its optimizers as DCP wants it, without a trace in either.

torch makes missing optimizer state by a step with a learning rate of zero. That step must not count
(Adam would start its bias correction one step late), and must not invent state that a parameter
never had.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerofx.checkpoint.entries import add_late, keep_dtypes, saved_in, thawed
from zerofx.checkpoint.groups import asked, match
from zerofx.checkpoint.ranks import Ranks
from zerofx.checkpoint.rows import refuse_lost
from zerofx.errors import UnsupportedError
from zerofx.runtime.handles import live_sessions
from zerofx.runtime.parameter import local_tensor
from zerofx.runtime.params import asks_for_losses, params_of
from zerofx.torch_private import without_step_hooks

State = dict[str, Any]


def take(model: nn.Module, optimizers: Sequence[Optimizer], ranks: Ranks) -> State:
    """The state as it is: `model`, and `optimizer` if there are any; tensors are not copied.

    Args:
        model: of the optimizers.
        optimizers: whose state it is, if there are any.
        ranks: that take it together.

    Raises:
        UnsupportedError: it cannot be saved, or would not be whole.
    """
    out: State = {"model": get_model_state_dict(model)}
    parts: list[State] = []
    for each in optimizers:
        if each.state:
            parts.append(_of(model, each))
        else:
            with _unnoticed(each):
                # torch takes no step if it finds a gradient: some change parameters at any rate.
                for param in params_of(each)[:1]:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                parts.append(_of(model, each))
    if not parts:
        return out
    refuse_lost(out["model"], [*zip(optimizers, parts, strict=True)], ranks)
    return {**out, "optimizer": _joined(parts)}


@contextlib.contextmanager
def to_fill(
    model: nn.Module, optimizers: Sequence[Optimizer], metadata: Metadata
) -> Iterator[State]:
    """Memory for what a checkpoint holds; after the block, model and optimizers have it.

    The model's tensors are its own. An optimizer's are new, one set for each parameter that has
    state in the checkpoint; if the block raises, the optimizers keep their old ones. So they do
    with settings that the checkpoint's groups lack.
    """
    out: State = {"model": get_model_state_dict(model)}
    if optimizers:
        with contextlib.ExitStack() as aside:
            kept = [aside.enter_context(_set_aside(each)) for each in optimizers]
            pairs = zip(optimizers, kept, strict=True)
            saved = saved_in(metadata)
            with thawed(model, saved):
                wanted = _joined([_of_unstepped(model, *pair) for pair in pairs])
            out["optimizer"] = wanted
            mine = wanted["param_groups"]
            wanted["param_groups"] = [
                asked(each, at, saved.settings.get(str(at), {})) for at, each in enumerate(mine)
            ]
            wanted["state"] = {
                name: entries for name, entries in wanted["state"].items() if name in saved.keys
            }
            add_late(wanted, out["model"], optimizers, saved)
            yield out
        groups = wanted["param_groups"]
        found, _ = match(groups, mine, optimizers)
        for group in groups:
            group.pop("param_names", None)  # in the order of the parameters then
        wanted["param_groups"] = [
            {**own, **groups[found[here]], "params": own["params"]} for here, own in enumerate(mine)
        ]
        # Not by `set_optimizer_state_dict`, which mistakes groups where one is empty.
        for each, part in zip(optimizers, _parted(optimizers, wanted), strict=True):
            each.load_state_dict(part)
            keep_dtypes(each, part)
    else:
        yield out
    set_model_state_dict(model, out["model"])


def _joined(parts: Sequence[State]) -> State:
    """State of several optimizers as of one that has all their groups, as torch joins it."""
    names = (
        name for part in parts for name in {n for g in part["param_groups"] for n in g["params"]}
    )
    shared = [name for name, count in collections.Counter(names).items() if count > 1]
    if shared:
        raise UnsupportedError(
            "several optimizers have these parameters, by whose names a checkpoint keeps state",
            "save each of those optimizers with the model in a checkpoint of its own, or leave "
            "each parameter to one of them",
            sorted(shared),
        )
    state = {name: entries for part in parts for name, entries in part["state"].items()}
    return {"state": state, "param_groups": [g for part in parts for g in part["param_groups"]]}


def _parted(optimizers: Sequence[Optimizer], joined: State) -> Iterator[State]:
    """What of it is each optimizer's, whose parameters' names are the ids that it loads by."""
    groups = iter(joined["param_groups"])
    for each in optimizers:
        own = list(itertools.islice(groups, len(each.param_groups)))
        names = [name for group in own for name in group["params"]]
        state = {name: joined["state"][name] for name in names if name in joined["state"]}
        yield {"state": state, "param_groups": own}


def _of(model: nn.Module, optimizer: Optimizer) -> State:
    name = type(optimizer).__name__
    if asks_for_losses(type(optimizer)):
        raise UnsupportedError(
            f"{name} steps with a closure only, and torch.distributed.checkpoint makes the state "
            "that it loads into by a step without one",
            "save the model alone, and optimizer.state_dict() beside it with torch.save: its "
            "vectors are whole on every rank",
        )
    _refuse_strangers(model, optimizer)
    try:
        return {**get_optimizer_state_dict(model, optimizer)}
    except KeyError as error:
        foreign = [repr(key) for key in optimizer.state if not isinstance(key, Tensor)]
        if not foreign:
            raise
        raise UnsupportedError(
            f"{name} has state under keys that are no parameters, for which "
            "torch.distributed.checkpoint has no names",
            "keep it in param_groups, or save the model alone and optimizer.state_dict() beside it",
            foreign,
        ) from error


def _refuse_strangers(model: nn.Module, optimizer: Optimizer) -> None:
    known = {id(param) for param in model.parameters()}
    strangers = [param for param in params_of(optimizer) if id(param) not in known]
    if strangers:
        raise UnsupportedError(
            f"{type(optimizer).__name__} steps over {len(strangers)} tensors that are no "
            f"parameters of this {type(model).__name__}, so that they have no names",
            "pass all modules that it trains as one model, here and when it is loaded: "
            'torch.nn.ModuleList([first, second]) or torch.nn.ModuleDict({"first": first, …})',
            [f"shape {list(each.shape)}" for each in strangers],
        )


def _of_unstepped(model: nn.Module, optimizer: Optimizer, kept: dict[Any, Any]) -> State:
    """With state that torch makes by a step, of which nothing else is left.

    Where steps make none, as of torch 2.11's Adagrad, with state like that which is kept.
    """
    with _unnoticed(optimizer), _values_back(optimizer):
        try:
            found = _of(model, optimizer)
        except KeyError:
            if not kept:
                raise
            optimizer.state.update({param: copy.deepcopy(state) for param, state in kept.items()})
            found = _of(model, optimizer)
    pairs = zip(optimizer.param_groups, found["param_groups"], strict=True)
    # The step may have counted in what torch found in the groups.
    groups = [{**settings, "params": group["params"]} for settings, group in pairs]
    return {**found, "param_groups": groups}


@contextlib.contextmanager
def _unnoticed(optimizer: Optimizer) -> Iterator[None]:
    """A step inside the block calls no hooks; settings and gradients are back afterwards."""
    groups = [
        {key: (value, _copied(value)) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        with without_step_hooks(optimizer, _knows_of_idle_steps), _gradients_back(optimizer):
            yield
    finally:
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            for key, (value, before) in settings.items():
                group[key] = value if isinstance(value, Tensor) else before
                if isinstance(value, Tensor) and not torch.equal(value, before):
                    value.detach().copy_(before)


def _copied(setting: Any) -> Any:
    if isinstance(setting, Tensor):
        return setting.detach().clone()
    return copy.copy(setting) if isinstance(setting, (dict, list, set)) else setting


def _knows_of_idle_steps(hook: Any) -> bool:
    """Whether a hook of all optimizers is zerofx's own, which keeps track of what is written."""
    return str(getattr(hook, "__module__", "")).startswith("zerofx.frontend.")


@contextlib.contextmanager
def _set_aside(optimizer: Optimizer) -> Iterator[dict[Any, Any]]:
    """Let torch make all state anew; gradients are back afterwards, old state if the block fails.

    torch makes none if it finds any state or gradient. The block is given the old state.
    """
    state = dict(optimizer.state)
    with _gradients_back(optimizer):
        optimizer.state.clear()
        for param in params_of(optimizer):
            param.grad = None
        try:
            yield state
        except BaseException:
            optimizer.state.clear()
            optimizer.state.update(state)
            raise


@contextlib.contextmanager
def _gradients_back(optimizer: Optimizer) -> Iterator[None]:
    """Whatever becomes of gradients inside the block; those that are held back are set aside."""
    params = params_of(optimizer)
    grads = [param.grad for param in params]
    with contextlib.ExitStack() as aside:
        for session in live_sessions():
            aside.enter_context(session.accumulation.set_aside(session.states))
        try:
            yield
        finally:
            for param, grad in zip(params, grads, strict=True):
                if param.grad is not grad:
                    param.grad = grad


@contextlib.contextmanager
def _values_back(optimizer: Optimizer) -> Iterator[None]:
    """Whatever becomes of parameters inside the block: decay may know no learning rate."""
    values = [
        local_tensor(each) if isinstance(each, DTensor) else each.detach()
        for each in params_of(optimizer)
    ]
    before = [value.to("cpu", copy=True) for value in values]  # where there is room
    try:
        yield
    finally:
        with torch.no_grad():
            for value, old in zip(values, before, strict=True):
                value.copy_(old)


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What DCP stores of `state`, by the name under which it does."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, list) and _is_opened(state):
        items = enumerate(state)
    else:
        yield name, state
        return
    for key, value in items:
        yield from leaves(value, f"{name}.{key}" if name else str(key))


def _is_opened(items: list[Any]) -> bool:
    """Whether DCP stores what is in a list, rather than the list."""
    return any(
        isinstance(item, (Mapping, Tensor)) or (isinstance(item, list) and _is_opened(item))
        for item in items
    )
