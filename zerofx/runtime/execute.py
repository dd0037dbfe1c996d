"""Run a lowered program: communication steps and compiled segments, in order.

Values live in numbered registers and are dropped after their last reader. A segment gets its
inputs in a list that it empties, so that nothing but the program decides how long a value lives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerofx.runtime.pending import Pending
from zerofx.runtime.place import Place


@dataclasses.dataclass(frozen=True)
class Register:
    """A reference to a value; anything else in an argument list is a constant."""

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
    """

    def __init__(
        self,
        steps: Sequence[Step],
        num_inputs: int,
        num_registers: int,
        outputs: Sequence[Any],
        unread_inputs: Sequence[int] = (),
    ) -> None:
        # AOTAutograd's sign that inputs come in a list; its wrappers copy instance attributes only.
        self._boxed_call = True
        self._steps = tuple(steps)
        self._num_inputs = num_inputs
        self._num_registers = num_registers
        self._outputs = tuple(outputs)
        self._unread = tuple(unread_inputs)

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run the program."""
        registers: list[Any] = [None] * self._num_registers
        registers[: self._num_inputs] = inputs
        inputs.clear()
        for number in self._unread:
            registers[number] = None
        with torch.no_grad():
            for step in self._steps:
                try:
                    _run(step, registers)
                except RuntimeError as error:
                    flying = [value for value in registers if isinstance(value, Pending)]
                    registers.clear()  # who handles the error may want the memory
                    if step.place is None:
                        raise
                    step.place.explain(error, flying)
        return tuple(
            registers[value.number] if isinstance(value, Register) else value
            for value in self._outputs
        )


def _run(step: Step, registers: list[Any]) -> None:
    arguments = [registers[number] for number in step.inputs]
    for number in step.drops:
        registers[number] = None
    result = step.run(arguments)
    if step.many:
        for number, value in zip(step.outputs, result, strict=True):
            registers[number] = value
    elif step.outputs:
        registers[step.outputs[0]] = result
