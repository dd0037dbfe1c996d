"""How many bytes of gathered values there are at once, if gathers start in the order of use."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What a gather takes.

    Attributes:
        needed: the gap of its waits.
        arriving: bytes from its start to its waits: of the codes that travel, or of the values.
        full: bytes from its waits on.
    """

    needed: int
    arriving: int
    full: int


class Room:
    """Bytes at once, from any gap until a gather's values are there.

    Bytes change with every start; less those that all starts so far take they do not, so they are
    written down once: at every gap, behind its frees, and behind the waits of every gather.

    Attributes:
        least: most bytes if every gather starts where it is needed.
        one_ahead: most bytes of values if every gather starts one use earlier.
    """

    def __init__(
        self, gathers: Sequence[Gathered], gaps: Sequence[int], freed: Mapping[int, int]
    ) -> None:
        """Walk over a program.

        Args:
            gathers: in the order of their need.
            gaps: in order, all at which something happens.
            freed: bytes that are freed at each gap, before anything starts there.
        """
        self._levels: list[tuple[int, int]] = []
        self._started: list[int] = []
        self._until: list[int] = []
        self._window: collections.deque[tuple[int, int]] = collections.deque()
        self._seen = self.least = self.one_ahead = 0
        left, level, started = collections.deque(gathers), 0, 0
        for gap in gaps:
            level -= freed.get(gap, 0)
            highest = level
            self._levels.append((gap, level))
            while left and left[0].needed == gap:
                each = left.popleft()
                started += each.arriving
                level += each.full - each.arriving
                highest = max(highest, level)
                self._levels.append((gap, level))
                self._started.append(started)
                self._until.append(len(self._levels))
                following = left[0].full if left else 0
                self.one_ahead = max(self.one_ahead, level + started + following)
            self.least = max(self.least, highest + started)

    def wanted(self, gap: int, number: int) -> int:
        """Most bytes until the values of a gather are there, if it starts here.

        Args:
            gap: here; not before that of an earlier call.
            number: of the gather, all before which have started; not smaller than earlier.
        """
        for place, level in self._levels[self._seen : self._until[number]]:
            while self._window and self._window[-1][1] <= level:
                self._window.pop()
            self._window.append((place, level))
        self._seen = max(self._seen, self._until[number])
        while self._window and self._window[0][0] < gap:
            self._window.popleft()
        return self._window[0][1] + self._started[number]
