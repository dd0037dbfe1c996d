"""What a rank holds at the peak of a step, and what fits: model states plus the curves of programs.

A step has three phases. In forward and backward live what the curves say; in the optimizer's step
live all gradients and what the optimizer computes on the way. Model states and buffers of the model
live all the time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from zerofx.cost.lines import Line
from zerofx.cost.memory import States

Phase = Literal["forward", "backward", "optimizer step"]


@dataclasses.dataclass(frozen=True)
class Resident:
    """What lives all the time on the rank that holds most; bytes.

    Attributes:
        states: parameters, gradients after a backward, optimizer state.
        buffers: of the model.
        step: what the optimizer allocates for a moment, less what is freed for it.
        standing: gradients that are there already, of other graphs and earlier micro-batches.
        codes: errors of coded gradients, and codes of frozen parameters.
    """

    states: States
    buffers: int
    step: int
    standing: int = 0
    codes: int = 0


@dataclasses.dataclass(frozen=True)
class Peak:
    """One rank's memory at the peak of a step; bytes.

    Attributes:
        phase: when.
        params: parameter values at rest, and buffers of the model.
        grads: gradients, full and reduced.
        optimizer: its state, master weights, and what its step allocates.
        activations: values of the model, inputs and results included.
        gathered: gathered values in use.
        messages: memory of collectives under way, and what they remember of codes.
    """

    phase: Phase
    params: int
    grads: int
    optimizer: int
    activations: int
    gathered: int
    messages: int

    @property
    def total(self) -> int:
        """All of it."""
        parts = dataclasses.asdict(self)
        del parts["phase"]
        return sum(parts.values())


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The memory of a step as a function of the batch size.

    Attributes:
        resident: what lives all the time.
        forward: curve of the forward program.
        backward: of the backward program.
        lasting: inputs and results of the model, which live in the optimizer's step too: bytes at
            batch size 0, and per sample.
    """

    resident: Resident
    forward: Line
    backward: Line
    lasting: tuple[float, float]

    def peak(self, batch: float) -> Peak:
        """The phase that needs most, for this batch size."""
        phases = (self._at("forward", batch), self._at("backward", batch), self._step(batch))
        return max(phases, key=lambda phase: phase.total)

    def activations(self, batch: float) -> tuple[float, float]:
        """(a, b) of a + b·batch, the activations where the peak at this batch size is."""
        phase = self.peak(batch).phase
        if phase == "optimizer step":
            return self.lasting
        line = self._line(phase)
        place = int(line.at(batch).sum(axis=1).argmax())
        return float(line.base[place, 0]), float(line.slope[place, 0])

    def largest_batch(self, memory_bytes: float) -> int:
        """The largest batch size that fits; 0 if none does. Every term is affine, so it is exact.

        Bounded by 2⁴⁰ for models whose memory does not grow with the batch.
        """
        most = float(1 << 40)
        fixed = self.always
        for phase in ("forward", "backward"):
            line = self._line(phase)
            base, slope = line.base.sum(axis=1), line.slope.sum(axis=1)
            room = memory_bytes - fixed - self.resident.standing - base
            if (room[slope <= 0] < 0).any():
                return 0
            rising = slope > 0
            if rising.any():
                most = min(most, float((room[rising] / slope[rising]).min()))
        room = memory_bytes - self._step(0).total
        if self.lasting[1] > 0:
            most = min(most, room / self.lasting[1])
        elif room < 0:
            return 0
        return max(0, math.floor(most))

    def _line(self, phase: str) -> Line:
        return self.forward if phase == "forward" else self.backward

    @property
    def always(self) -> int:
        """Bytes that live in all phases, gradients apart."""
        states = self.resident.states
        return int(states.params + states.optimizer) + self.resident.buffers + self.resident.codes

    def _at(self, phase: Phase, batch: float) -> Peak:
        rows = self._line(phase).at(batch)
        row = rows[int(rows.sum(axis=1).argmax())]
        activations, grads, messages, gathered = (int(np.rint(value)) for value in row)
        states = self.resident.states
        return Peak(
            phase,
            params=int(states.params) + self.resident.buffers,
            grads=grads + self.resident.standing,
            optimizer=int(states.optimizer),
            activations=activations,
            gathered=gathered,
            messages=messages + self.resident.codes,
        )

    def _step(self, batch: float) -> Peak:
        states = self.resident.states
        return Peak(
            "optimizer step",
            params=int(states.params) + self.resident.buffers,
            grads=int(states.grads),
            optimizer=int(states.optimizer) + self.resident.step,
            activations=int(self.lasting[0] + batch * self.lasting[1]),
            gathered=0,
            messages=self.resident.codes,
        )
