"""When the steps of a program really run: one of its runs, timed on the stream that computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zerofx.frontend.segments import Segment
from zerofx.ir import ops
from zerofx.ir.program import Program
from zerofx.ir.text import node_names

Run = Callable[[list[Any]], Any]
Json = Any


class Stopwatch:
    """Times every step of one run of a program.

    A collective is under way from its start to the end of its first wait, at most; a wait is time
    in which computation stands still. Between steps nothing is awaited, so that on CUDA, where
    events take the time, they overlap as ever.

    Args:
        program: after its last pass.
        number: of the run, counted from 0.
        device: `cuda` or `cpu`.
        done: called with what was measured.
    """

    def __init__(
        self, program: Program, number: int, device: str, done: Callable[[dict[str, Json]], None]
    ) -> None:
        self._names = node_names(program)
        self._left = number + 1
        self._cuda = device == "cuda"
        self._done = done
        self._pieces: list[fx.Node | Segment] = []
        self._marks: list[Any] = []

    def around(self, piece: fx.Node | Segment, run: Run) -> Run:
        """The step `run` with a look at the clock; called once for each, in order."""
        place = len(self._pieces)
        self._pieces.append(piece)

        def timed(arguments: list[Any]) -> Any:
            self._left -= place == 0
            if self._left:
                return run(arguments)
            if place == 0:
                self._marks = [self._mark()]
            result = run(arguments)
            self._marks.append(self._mark())
            if place == len(self._pieces) - 1:
                self._finish()
            return result

        return timed

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _finish(self) -> None:
        first = self._marks[0]
        if self._cuda:
            self._marks[-1].synchronize()
            at = [first.elapsed_time(mark) / 1000 for mark in self._marks]
        else:
            at = [mark - first for mark in self._marks]
        self._marks.clear()
        spans = self._spans(at)
        waited = sum(span["end"] - span["begin"] for span in spans if span["stream"] == "stall")
        self._done({"seconds": at[-1], "exposed_seconds": waited, "spans": spans})

    def _spans(self, at: list[float]) -> list[dict[str, Json]]:
        spans: list[dict[str, Json]] = []
        under_way: dict[fx.Node, dict[str, Json]] = {}
        for piece, begin, end in zip(self._pieces, at, at[1:], strict=False):
            if isinstance(piece, Segment):
                if piece.outputs and not piece.only_views:
                    spans.append(self._span(piece.outputs[0], "compute", begin, end))
            elif ops.is_start(piece):
                under_way[piece] = self._span(piece, "link", begin, end)
                spans.append(under_way[piece])
            elif ops.is_wait(piece):
                start = ops.started_by(piece)
                spans.append(self._span(start, "stall", begin, end))
                if start in under_way:
                    under_way.pop(start)["end"] = end
        return spans

    def _span(self, node: fx.Node, stream: str, begin: float, end: float) -> dict[str, Json]:
        return {"node": self._names[node], "stream": stream, "begin": begin, "end": end}
