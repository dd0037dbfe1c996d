"""The public functions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx.frontend.backend  # noqa: F401 (installs the optimizer hooks)
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError, ShardingError, UnsupportedError
from zerofx.frontend.first_forward import shard_for_passes
from zerofx.frontend.step_guard import trust
from zerofx.option_checks import refuse_at_stage
from zerofx.passes.registry import with_registered
from zerofx.runtime.drift import Drift
from zerofx.runtime.handles import note_call, states_by_param
from zerofx.runtime.loss_scale import GradScaler
from zerofx.runtime.owner_optimizer import OwnerOptimizer
from zerofx.runtime.params import ParamState
from zerofx.runtime.session import Session
from zerofx.sharding.materialise import meta_init
from zerofx.sharding.shard import MakeValues, no_sync_once_sharded, session_of
from zerofx.sharding.weights import Weights
from zerofx.sharding.write_back import Before, write_back
from zerofx.torch_private import leave_to_python, unwrap_compiled

__all__ = [
    "GradScaler",
    "OwnerOptimizer",
    "drift",
    "load_safetensors",
    "meta_init",
    "no_sync",
    "refresh",
    "shard",
    "trust",
    "unshard",
]

Model = TypeVar("Model", bound=nn.Module)


def shard(model: Model, config: ZeroConfig | None = None) -> Model:
    """Shard `model` in place, before its first forward.

    The explicit form of what `torch.compile(model, backend="zeroN")` does by itself. It is needed
    when only parts of a model are compiled, or none. Every rank must call it; again with the same
    options after layers were added, as forwards that are not compiled do not shard them.

    Args:
        model: plain `nn.Module`; its parameters become `DTensor`s. What is on the meta device is
            initialised shard by shard (see `meta_init`), or comes from rank 0 if that rank has
            values.
        config: stage and options; stage 3 by default.

    Returns:
        The same model.

    Raises:
        ZeroFxError: the model, an optimizer or the process group is refused; the message names it.
    """
    _shard(_module(model), config)
    return model


def load_safetensors(
    model: Model,
    path: str | os.PathLike[str],
    config: ZeroConfig | None = None,
    *,
    strict: bool = True,
) -> Model:
    """Read weights into `model`; each rank reads its rows only. Every rank must call it.

    Args:
        model: sharded, or not yet: then it is sharded first. On the meta device, its parameters
            never exist whole.
        path: a safetensors file, or a folder with one or with several and their index, as
            transformers writes them. Values are converted to the parameters' dtypes.
        config: for a model that is not sharded yet; stage 3 by default.
        strict: refuse names that only the model or only the files have. Without it what the files
            lack keeps its value, or is initialised as `shard` would.

    Returns:
        The same model.

    Raises:
        CheckpointError: files, names or shapes do not fit; the message lists them.
        ShardingError: `config` is given for a model that is sharded with another one.
    """
    plain = _module(model)
    with Weights(path) as weights:
        weights.check(plain, strict)
        session = session_of(plain)
        if session is None or config is not None:
            session = _shard(plain, config, make_values=weights.make_values)
        weights.fill(plain, session)
    return model


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without exchanging them.

    At stages 0 and 1 each rank sums full local gradients, which costs one full gradient per
    parameter (4 bytes an element in fp32) until the first backward outside the context exchanges
    the sum. At stages 2 and 3 gradients are sharded at rest and every backward reduces all the
    same: the result does not differ, and no memory is spent. On a hybrid mesh they reduce inside
    the groups, and hold a sum as large as the shards until that backward shares it across groups.

    `zero_grad()` inside drops the sum.

    Args:
        model: sharded, or sharded by its first forward inside the context.

    Raises:
        ShardingError: the model is still not sharded at the end.
    """
    plain = _module(model)
    session = session_of(plain)
    if session is not None:
        with session.accumulation.no_sync():
            yield
        return
    with no_sync_once_sharded(plain):
        yield
    _session(plain)  # raises, if no forward inside sharded it


@contextlib.contextmanager
def unshard(
    what: nn.Module | Tensor | Iterable[Tensor], *, writeback: bool = True
) -> Iterator[dict[str, Tensor]]:
    """Full values of parameters, by name; every rank must enter and leave.

    Holds all of them in memory on every rank while it is open.

    Args:
        what: a sharded model, a module inside one, or parameters of one, or one of them.
        writeback: whether values that were edited are written to the shards at the end, if the
            block ends without an exception: edit alike on all ranks. Edits of the parameters
            themselves stay as well, unless their value was edited, too.

    Yields:
        Values by the names of `what.named_parameters()`; for parameters, by their names in the
        model.

    Raises:
        ShardingError: the model, or a parameter, is not sharded; or parameters have one name.
        UnsupportedError: at the end, ranks edited a value differently, or the dict does not hold
            the values of all names in their shapes.
    """
    states = _states_of(what)
    note_call("unshard", ", ".join(states), (state.param for state in states.values()))
    with torch.no_grad():
        values = {
            name: cast(DTensor, state.param.detach()).full_tensor().clone()
            for name, state in states.items()
        }
    before = {name: Before.of(states[name], value) for name, value in values.items() if writeback}
    yield values
    if before:
        write_back(states, before, values)


def refresh(model: nn.Module) -> None:
    """Say that shards were edited behind PyTorch's back (through `.data`, or by another library).

    Stages 1 and 2 then gather their resident copies anew before the next forward, and stage 3 drops
    what it keeps for backward, secondary shards included; codes of frozen weights are made anew,
    and errors of coded gradients begin at zero. Every rank must call it. Edits through PyTorch
    operations are seen without it.

    Raises:
        ShardingError: the model is not sharded.
    """
    _session(model).refresh()


def drift(model: nn.Module) -> list[Drift]:
    """How far the codes of each bucket were from its numbers when they were last compared.

    With `drift_every=n`, every n-th time that a bucket travels as codes, each rank decodes what it
    coded. What is found is logged too, and warned about where a codec does not suit the numbers.

    Args:
        model: sharded, with quantized weights or gradients.

    Returns:
        Of each bucket name, codec, relative error of this rank's numbers, the error that is usual,
        and the part of the numbers that became zero; empty before the first comparison.

    Raises:
        ShardingError: the model is not sharded.
    """
    return _session(model).codes.drift.latest()


def _states_of(what: nn.Module | Tensor | Iterable[Tensor]) -> dict[str, ParamState]:
    known = states_by_param()
    if isinstance(what, nn.Module):
        _session(what)
        named = unwrap_compiled(what).named_parameters()
        return {name: known[id(param)] for name, param in named if id(param) in known}
    params = [what] if isinstance(what, Tensor) else list(what)
    plain = [param for param in params if id(param) not in known]
    if plain:
        raise ShardingError(
            "what is no parameter of a sharded model has no shards to gather",
            "pass parameters of a sharded model, as model.parameters() gives them now",
            [
                f"a {type(each).__name__} of shape {list(getattr(each, 'shape', ()))}"
                for each in plain
            ],
        )
    states: dict[str, ParamState] = {}
    for state in (known[id(param)] for param in params):
        if states.setdefault(state.spec.name, state) is not state:
            raise ShardingError(
                "parameters of several models have one name",
                "enter zerofx.unshard(…) once for each model",
                [state.spec.name],
            )
    return states


def _shard(model: nn.Module, config: ZeroConfig | None, **how: MakeValues) -> Session:
    if not isinstance(config, (ZeroConfig, type(None))):  # users may pass anything
        raise ConfigError(f"{config!r} is no configuration", "pass zerofx.ZeroConfig(stage=3, …)")
    config = with_registered(config or ZeroConfig())
    refuse_at_stage(config)
    return shard_for_passes(model, config, **how)


def _session(model: nn.Module) -> Session:
    session = session_of(_module(model))
    if session is None:
        raise ShardingError(
            f"{type(model).__name__} is not sharded",
            "call zerofx.shard(model, config), or run one forward of the compiled model first",
        )
    return session


def _module(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"a {type(model).__name__} was given for the model", "pass the nn.Module itself"
        )
    return unwrap_compiled(model)


leave_to_python("zerofx.api", "zerofx.runtime", "zerofx.sharding")
