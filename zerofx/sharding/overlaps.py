"""Which tensors share elements in memory."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.torch_private import below_transforms, storage_key


class Places:
    """Where parameters lie in memory.

    Args:
        params: plain ones. They are to keep their memory as long as this is asked.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._by_storage = collections.defaultdict[int, list[nn.Parameter]](list)
        for param in params:
            self._by_storage[storage_key(param)].append(param)

    def shown_by(self, thing: Any) -> nn.Parameter | None:
        """The first of them that has elements in common with a plain tensor."""
        if not is_plain(thing):
            return None
        near = self._by_storage.get(storage_key(thing), ())
        return next((param for param in near if _meet(param, thing)), None)


def is_plain(thing: Any) -> bool:
    """Whether it is a tensor of torch's own class that shows memory; those of `vmap` have none."""
    strided = type(thing) is Tensor and thing.layout is torch.strided
    return strided and below_transforms(thing) is thing


def reach(tensor: Tensor) -> int:
    """Elements from the first one in memory to the last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether tensors in the same stretch of memory share elements: columns of a matrix do not."""
    if one.dtype is not other.dtype or (one.is_contiguous() and other.is_contiguous()):
        return True
    first = min(one.storage_offset(), other.storage_offset())
    length = max(each.storage_offset() - first + reach(each) for each in (one, other))
    taken = torch.zeros(length, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether tensors in the same storage share elements."""
    if not (one.numel() and other.numel()):
        return False
    (begin, end), (start, stop) = map(_stretch, (one, other))
    if begin >= stop or start >= end:
        return False
    # What has no gaps has the other's first or last element, unless it lies between these.
    return (one.is_contiguous() and (begin <= start or stop <= end)) or overlap(one, other)


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """Bytes of the storage before the first element, and up to the last one's end."""
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + reach(tensor)) * size
