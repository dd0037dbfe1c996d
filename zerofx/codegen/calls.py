"""A kernel as calls of functions on rectangles of its operands, each worked out once.

Between calls of a kernel only the addresses of its operands change, so views are remembered as
sizes, strides and offsets: one operation gives a view that takes five or six to derive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from zerofx.codegen.functions import Function
from zerofx.ir.kernels import TensorSpec
from zerofx.torch_private import storage_key


@dataclasses.dataclass(frozen=True)
class _View:
    """What `torch.as_strided` takes.

    Attributes:
        memory: number of the operand, seen in one dtype.
        size: of the view.
        stride: of each axis.
        offset: elements from the operand's first.
    """

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Calls:
    """Functions and the views that they are called with.

    While it is made, `operands` and what `scratch` gives stand for tensors of the kernel: they are
    on the meta device, and so are views of them. Called with tensors, it calls all functions in
    order.

    Args:
        operands: contiguous.
        device: where they are when it is called.

    Attributes:
        operands: what stands for them.
    """

    def __init__(self, operands: Sequence[TensorSpec], device: torch.device) -> None:
        self.device = device
        self._numbers: dict[int, int] = {}
        self._memories: dict[tuple[int, torch.dtype], int] = {}
        self._scratch: list[Tensor] = []
        self._calls: list[tuple[Function, tuple[_View, ...]]] = []
        self.operands = [self._stand_in(*spec) for spec in operands]

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory, with anything in it, that is there for the time of the calls."""
        self._scratch.append(self._stand_in(shape, dtype))
        return self._scratch[-1]

    def add(self, function: Function, *views: Tensor) -> None:
        """Call `function` with these views when the time comes, if the first holds anything."""
        if views[0].numel():
            self._calls.append((function, tuple(self._view(view) for view in views)))

    def __call__(self, operands: Sequence[Tensor]) -> None:
        """Call everything that was added, with views of `operands`."""
        scratch = [torch.empty_like(each, device=self.device) for each in self._scratch]
        tensors = [*operands, *scratch]
        memories = [tensors[number].view(dtype) for number, dtype in self._memories]
        starts = [memory.storage_offset() for memory in memories]
        for function, views in self._calls:
            function(
                *(
                    memories[view.memory].as_strided(
                        view.size, view.stride, starts[view.memory] + view.offset
                    )
                    for view in views
                )
            )

    def _stand_in(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device="meta")
        self._numbers[storage_key(made)] = len(self._numbers)
        return made

    def _view(self, view: Tensor) -> _View:
        key = (self._numbers[storage_key(view)], view.dtype)
        memory = self._memories.setdefault(key, len(self._memories))
        return _View(memory, tuple(view.shape), view.stride(), int(view.storage_offset()))
