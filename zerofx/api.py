"""The public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx.frontend.backend  # noqa: F401 (installs the optimizer hooks)
from zerofx.config import ZeroConfig
from zerofx.errors import ShardingError
from zerofx.passes.fingerprint import fingerprint
from zerofx.passes.pipelines import pipeline
from zerofx.passes.registry import with_registered
from zerofx.runtime.params import local_tensor
from zerofx.runtime.session import Session
from zerofx.sharding.assignments import drop_unowned
from zerofx.sharding.rows import cut
from zerofx.sharding.shard import session_of, shard_model
from zerofx.torch_private import unwrap_compiled

Model = TypeVar("Model", bound=nn.Module)


def shard(model: Model, config: ZeroConfig | None = None) -> Model:
    """Shard `model` in place, before its first forward.

    The explicit form of what `torch.compile(model, backend="zeroN")` does by itself. It is needed
    when only parts of a model are compiled, or none. Every rank must call it.

    Args:
        model: plain `nn.Module`; its parameters become `DTensor`s.
        config: stage and options; stage 3 by default.

    Returns:
        The same model.

    Raises:
        ZeroFxError: the model, an optimizer or the process group is refused; the message names it.
    """
    config = with_registered(config or ZeroConfig())
    shard_model(unwrap_compiled(model), config, fingerprint(pipeline(config, 0)))
    return model


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without exchanging them.

    At stages 0 and 1 each rank sums full local gradients, which costs one full gradient per
    parameter (4 bytes an element in fp32) until the first backward outside the context exchanges
    the sum. At stages 2 and 3 gradients are sharded at rest and every backward reduces all the
    same: the result does not differ, and no memory is spent.

    `zero_grad()` inside drops the sum, but for `zero_grad(set_to_none=False)` of an optimizer built
    with `foreach=True` or `fused=True`, which leaves no trace on a `DTensor`.

    Raises:
        ShardingError: the model is not sharded (yet).
    """
    with _session(model).no_sync():
        yield


@contextlib.contextmanager
def unshard(model: nn.Module, *, writeback: bool = True) -> Iterator[dict[str, Tensor]]:
    """Full values of all parameters, by name; every rank must enter and leave.

    Holds the whole model in memory on every rank while it is open.

    Args:
        model: a sharded model.
        writeback: whether edits of the values are written to the shards at the end; each rank
            writes its own part, so edit alike on all ranks.

    Raises:
        ShardingError: the model is not sharded.
    """
    session = _session(model)
    drop_unowned(session)
    with torch.no_grad():
        values = {
            state.spec.name: cast(DTensor, state.param.detach()).full_tensor().clone()
            for state in session.states
        }
    yield values
    if writeback:
        with torch.no_grad():
            for state in session.states:
                mine = local_tensor(cut(values[state.spec.name], state))
                state.shard.copy_(mine)
                state.dirty = True


def refresh(model: nn.Module) -> None:
    """Say that shards were edited behind PyTorch's back (through `.data`, or by another library).

    Stages 1 and 2 then gather their resident copies anew before the next forward. Edits through
    PyTorch operations are seen without it.

    Raises:
        ShardingError: the model is not sharded.
    """
    for state in _session(model).states:
        state.dirty = True


def _session(model: nn.Module) -> Session:
    session = session_of(unwrap_compiled(model))
    if session is None:
        raise ShardingError(
            f"{type(model).__name__} is not sharded",
            "call zerofx.shard(model, config), or run one forward of the compiled model first",
        )
    return session
