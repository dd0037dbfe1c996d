"""What reading a parameter of a sharded module gives, and whether a forward asks for it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.errors import UnsupportedError
from zerofx.ir.ops import UNSHARD
from zerofx.runtime.parameter import Sharded
from zerofx.runtime.params import ParamState
from zerofx.sharding.refuse import refuse_past_recompile_limit
from zerofx.torch_private import backward_id, below_transforms, inside_transform, local_part

STATES = "_zerofx_states"
"""Attribute of a module: what is known of its parameters."""
READS = "_zerofx_reads"
"""Attribute of a module: shapes, layouts and dtypes of full values, for Dynamo."""

_CALL_FILE = nn.Module._call_impl.__code__.co_filename


def is_bound(module: nn.Module) -> bool:
    """Whether `module` has a generated class."""
    return STATES in module.__dict__


def bound_states(module: nn.Module) -> dict[str, ParamState]:
    """States of the parameters that `module` itself owns, by attribute name."""
    return dict(module.__dict__.get(STATES, {}))


def in_forward() -> bool:
    """Whether a module is being called, or a backward runs, which may run parts of one again."""
    if backward_id() >= 0:
        return True
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_impl" and code.co_filename == _CALL_FILE:
            return True
        frame = frame.f_back
    return False


def _read(module: nn.Module, name: str, param: Any) -> Tensor:
    if not isinstance(below_transforms(param), DTensor):
        return param
    state = bound_states(module)[name]
    if inside_transform():
        raise UnsupportedError(
            f"a torch.func transform runs over a sharded {type(module).__name__}",
            "give it full values: with zerofx.unshard(model, writeback=False) as values: "
            "torch.func.functional_call(model, values, inputs)",
            [state.spec.name],
        )
    session = state.domain.session
    refuse_past_recompile_limit(state.spec.name, session.recompile_limit)
    if backward_id() >= 0:
        kept = session.handed_out.kept_for(state)
        if kept is not None:
            return kept
    elif session.config.broadcast_buffers and (own := list(module.buffers(recurse=False))):
        # Where Dynamo skipped the frame no program does it: BatchNorm next to an LSTM.
        part, trains = (id(module), name), torch.is_grad_enabled()
        session.buffers.before_eager_part(session, part, own, trains=trains)
        if module.training and getattr(module, "track_running_stats", False):
            session.buffers.will_change(own)
    shard, spec = local_part(param, Sharded), state.spec
    value = UNSHARD(shard, param.shape, spec.layout.handle, spec.cast)
    session.handed_out.add(state, value)
    return value


# Around code that Dynamo skipped it would compile DTensor's own frames.
read_eagerly: Any = torch.compiler.disable(_read)


def _refuse_removal(module: nn.Module, name: str) -> None:
    """Refuse `delattr` of a sharded parameter by a forward: what was read there is no parameter.

    So `register_parametrization` would keep a full value as a buffer, which nobody trains.

    Raises:
        UnsupportedError: names the parameter.
    """
    state = bound_states(module).get(name)
    if state is not None and in_forward():
        raise UnsupportedError(
            "a forward takes parameters off their modules, as register_parametrization does; what "
            "it puts in their place would be full values that are trained no more",
            "register parametrizations outside of forward, or call torch.func.functional_call("
            "module, {name: value}, inputs); where target_parameters of PEFT do it, call "
            "zerofx.integrations.trace_target_parameters(model) before the first forward",
            [state.spec.name],
        )


refuse_removal: Any = torch.compiler.disable(_refuse_removal)
