"""Run a lowered program: communication steps and compiled segments, in order.

Values live in numbered registers and are dropped after their last reader. A segment gets its
inputs in a list that it empties, so that nothing but the program decides how long a value lives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zerofx.runtime.pending import Pending
from zerofx.runtime.place import Place
from zerofx.torch_private import storage_key


@dataclasses.dataclass(frozen=True)
class Register:
    """A reference to a value; anything else among outputs is a constant."""

    number: int


@dataclasses.dataclass(frozen=True)
class Step:
    """One instruction.

    Attributes:
        run: takes the list of inputs; a segment returns a sequence, any other step one value.
        inputs: registers that it reads, in order.
        outputs: registers that it writes.
        drops: registers whose last reader it is.
        many: whether it returns a sequence.
        place: what to say if it fails.
    """

    run: Callable[[list[Any]], Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    drops: tuple[int, ...]
    many: bool
    place: Place | None = None


class Executable:
    """A program ready to run; called with a list of inputs, which it empties.

    Args:
        steps: instructions in order.
        num_inputs: registers 0 to `num_inputs - 1` hold the inputs.
        num_registers: how many there are.
        outputs: registers and constants to return.
        unread_inputs: registers of inputs that no step reads.
        apart: whether outputs may share memory neither with each other nor with inputs.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        num_inputs: int,
        num_registers: int,
        outputs: Sequence[Any],
        unread_inputs: Sequence[int] = (),
        *,
        apart: bool = False,
    ) -> None:
        # AOTAutograd's sign that inputs come in a list; its wrappers copy instance attributes only.
        self._boxed_call = True
        self._steps = tuple(steps)
        self._num_inputs = num_inputs
        self._num_registers = num_registers
        self._outputs = tuple(outputs)
        self._unread = tuple(unread_inputs)
        self._apart = apart

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run the program."""
        registers: list[Any] = [None] * self._num_registers
        registers[: self._num_inputs] = inputs
        given = list(_memory_of(inputs)) if self._apart else []
        inputs.clear()
        for number in self._unread:
            registers[number] = None
        with torch.no_grad():
            for step in self._steps:
                arguments = [registers[number] for number in step.inputs]
                for number in step.drops:
                    registers[number] = None
                try:
                    _store(step.run(arguments), step, registers)
                except BaseException as error:
                    flying = [v for v in (*registers, *arguments) if isinstance(v, Pending)]
                    registers.clear()  # who handles the error may want the memory
                    arguments.clear()
                    if step.place is None:
                        raise
                    step.place.explain(error, flying)
        outputs = tuple(
            registers[value.number] if isinstance(value, Register) else value
            for value in self._outputs
        )
        return tuple(_taken_apart(outputs, given)) if self._apart else outputs


def _store(result: Any, step: Step, registers: list[Any]) -> None:
    if step.many:
        for number, value in zip(step.outputs, result, strict=True):
            registers[number] = value
    elif step.outputs:
        registers[step.outputs[0]] = result


def _memory_of(values: Sequence[Any]) -> Iterator[StorageWeakRef]:
    """Names what is in use: nothing else takes such a name while the reference lives."""
    for value in values:
        if isinstance(value, Tensor):
            yield StorageWeakRef(value.untyped_storage())


def _taken_apart(values: Sequence[Any], given: Sequence[StorageWeakRef]) -> Iterator[Any]:
    """Copies of those tensors that lie in memory of others."""
    taken = {each.cdata for each in given}
    for value in values:
        if isinstance(value, Tensor):
            if storage_key(value) in taken:
                value = value.clone()
            taken.add(storage_key(value))
        yield value
