"""Hooks around every optimizer step: nothing trains wrongly in silence.

Importing the backend installs them. Before a step, plain parameters whose gradients no rank
exchanged are an error once a model was to be compiled or sharded; after it, resident copies of what
it updated are out of date. In between gradients have the dtypes of their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zerofx.errors import ConfigError, UnreducedGradientError
from zerofx.frontend.roots import live_modules, names_of
from zerofx.runtime.finite import refuse_non_finite
from zerofx.runtime.gradients import narrow_gradients, widen_gradients
from zerofx.runtime.handles import live_sessions, states_by_param
from zerofx.runtime.owner_optimizer import OwnerOptimizer
from zerofx.runtime.ownership import states_of
from zerofx.runtime.params import ParamState, params_of
from zerofx.sharding.old_handles import cut_gradients, cut_state
from zerofx.sharding.rows import cut
from zerofx.sharding.stale import StaleParameter
from zerofx.torch_private import looked_up

_REDUCED = "_zerofx_reduced_by_wrapper"
_TRUSTED = "_zerofx_trusted"
_BACKENDS = ("zero", "zero0", "zero1", "zero2", "zero3")


def install() -> None:
    """Register the hooks; call once. Dynamo, if it compiles a step, leaves them as they are."""
    untraced: Any = torch.compiler.disable
    register_optimizer_step_pre_hook(untraced(_before_step))
    register_optimizer_step_post_hook(untraced(_after_step))


def trust(optimizer: Optimizer) -> None:
    """Let `optimizer` step over plain parameters, whose gradients zerofx does not average.

    They are averaged by hand, or each rank has a model of its own: a bandit, a probe. Without this
    such a step is an error where there are several ranks; `DistributedDataParallel` and FSDP are
    known.

    Raises:
        ConfigError: it is no optimizer of torch.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer",
            "pass the optimizer that steps, not what wraps it",
        )
    setattr(optimizer, _TRUSTED, True)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    # The optimizer is the first argument, a closure that runs backward may be the second.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _check(optimizer)
        return None
    checked = _checked(closure, optimizer)
    if len(args) > 1:
        return (args[0], checked, *args[2:]), kwargs
    return args, {**kwargs, "closure": checked}


def _checked(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """The closure, after whose backward gradients are looked at."""

    def both() -> Any:
        loss = closure()
        _check(optimizer)
        return loss

    return both


def _check(optimizer: Optimizer) -> None:
    """Refuse what the optimizer is about to apply, if it would train wrongly."""
    params = params_of(optimizer)
    for state in _written_idly(optimizer, params):
        state.idle_step_begins()
    if any(isinstance(param, DTensor) for param in params):
        states = states_by_param()
        if not isinstance(optimizer, OwnerOptimizer):  # which keeps its state whole
            cut_state(optimizer, states, cut)
        cut_gradients(params, states, cut)
    for session in live_sessions():
        session.refuse_pending(params)
        session.handed_out.refuse_written()
        if session.config.detect_anomaly:
            refuse_non_finite(session, params)
    if dist.get_world_size() > 1 and _applies(optimizer) and not hasattr(optimizer, _TRUSTED):
        _refuse_unreduced(params)
    for session in live_sessions():
        if session.config.grad_dtype is not None:
            widen_gradients(states_of(params, session.states))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    params, applies = params_of(optimizer), _applies(optimizer)
    for state in _written_idly(optimizer, params):
        state.idle_step_ends()
    for session in live_sessions():
        session.optimizer_stepped(params, applies=applies)
        if session.config.grad_dtype is not None:
            narrow_gradients(session.states)


def _applies(optimizer: Optimizer) -> bool:
    """With learning rates of zero torch makes optimizer state before a checkpoint is loaded.

    One on a GPU counts as another: the host would wait for its number at every step.
    """
    rates = [group.get("lr", 1) for group in optimizer.param_groups]
    return any((isinstance(rate, Tensor) and not rate.is_cpu) or rate != 0 for rate in rates)


def _written_idly(optimizer: Optimizer, params: list[Tensor]) -> list[ParamState]:
    """What the optimizer writes the values to that are there."""
    if _applies(optimizer):
        return []
    known = states_by_param()
    return [known[id(param)] for param in params if id(param) in known]


def _refuse_added(suspects: set[int]) -> None:
    """Refuse what a sharded model got since, if its forwards are not compiled, which shard it."""
    roots = (session.root() for session in live_sessions())
    added = {
        name: type(root).__name__
        for root in roots
        if root is not None
        for name, param in nn.Module.named_parameters(root)
        if id(param) in suspects
    }
    if added:
        raise UnreducedGradientError(
            "an optimizer is about to apply gradients that only this rank knows: these parameters "
            f"were added to {', '.join(sorted(set(added.values())))} after it was sharded, and a "
            "forward that is not compiled does not shard them",
            "call zerofx.shard(model, config) again, with the same options, once layers were "
            "added, and zero_grad()",
            added,
        )


def _refuse_unreduced(params: list[Tensor]) -> None:
    if not live_sessions() and not looked_up(_BACKENDS):
        return  # a program that has only imported zerofx yet
    plain = [param for param in params if not isinstance(param, (DTensor, StaleParameter))]
    suspects = {
        id(param)
        for param in plain
        # A tensor that is no parameter is of no model: a temperature, an image that is optimized.
        if isinstance(param, nn.Parameter) and param.requires_grad
        if param.grad is not None and not hasattr(param, _REDUCED)
    }
    if not suspects:
        return
    modules = live_modules()
    for module in modules:
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            for param in module.parameters():
                setattr(param, _REDUCED, True)  # looked for once, not at every step
                suspects.discard(id(param))
    _refuse_added(suspects)
    if suspects:
        ours = (
            "call zerofx.shard(model, zerofx.ZeroConfig(stage=…)) on the whole model before the "
            "first forward; or, if the reason is one of the others, compile with "
            "torch.compile(model, …), or raise torch._dynamo.config.recompile_limit"
        )
        others = (
            "models that zerofx does not train (one to compare with, say) belong in "
            "DistributedDataParallel or, if you average their gradients yourself or each rank has "
            "its own, need zerofx.trust(optimizer)"
        )
        raise UnreducedGradientError(
            "an optimizer is about to apply gradients that only this rank knows: these parameters "
            "were not sharded (Dynamo skipped the code that reads them, as it does with "
            "nn.Sequential and the like under model.compile(); the stage was left open, "
            'backend="zero", and a forward calls nn.LSTM or breaks its graph in a loop; Dynamo ran '
            "into its recompile limit; a part of the model was compiled alone; the loop calls "
            "methods of the model that are not its forward, which torch.compile leaves alone; or a "
            "function that another torch.compile compiles calls the model)",
            # Where a model is sharded already, this is more likely another one.
            f"{others}; {ours}" if live_sessions() else f"{ours}; {others}",
            names_of(suspects, modules) or [f"{len(suspects)} parameters that no module owns"],
        )
