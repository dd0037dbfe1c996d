"""Gradients that are not finite, found before an optimizer applies them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.errors import NonFiniteGradientError
from zerofx.runtime.ownership import states_of
from zerofx.runtime.parameter import local_tensor
from zerofx.runtime.session import Session


def refuse_non_finite(session: Session, params: Iterable[Tensor]) -> None:
    """Look at the gradients of those `params` that are the session's; one small all-reduce.

    Raises:
        NonFiniteGradientError: on all ranks alike, one of them has nan or inf; names all such.
    """
    states = states_of(params, session.states)
    grads = {state.spec.name: state.param.grad for state in states if state.param.grad is not None}
    if not grads:
        return
    finite = torch.stack([local_tensor(grad).isfinite().all() for grad in grads.values()]).int()
    if session.world.size > 1:
        group = session.world.group
        with session.recorded("all_reduce", f"finiteness of {len(grads)} gradients") as wait:
            wait(dist.all_reduce(finite, dist.ReduceOp.MIN, group=group, async_op=True))
    bad = [name for name, fine in zip(grads, finite.tolist(), strict=True) if not fine]
    if bad:
        raise NonFiniteGradientError(
            "gradients are not finite before an optimizer step",
            "look for the operation with torch.autograd.set_detect_anomaly(True); lower the "
            "learning rate, clip, or use a wider reduce_dtype",
            bad,
        )
