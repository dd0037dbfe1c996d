"""Hooks of optimizer steps, which torch lets a program add and remove one by one only."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


@contextlib.contextmanager
def without_step_hooks(optimizer: Optimizer, keeps: Callable[[Any], bool]) -> Iterator[None]:
    """Inside the block a step calls none of its hooks, and of all optimizers' those that `keeps`.

    Args:
        optimizer: that steps.
        keeps: says which hooks of all optimizers stay.
    """
    of_all: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    before = [dict(hooks) for hooks in of_all]
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    for hooks in of_all:
        for key in [key for key, hook in hooks.items() if not keeps(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = own
        for hooks, old in zip(of_all, before, strict=True):
            for key, hook in old.items():  # in their order
                hooks.pop(key, None)
                hooks[key] = hook
