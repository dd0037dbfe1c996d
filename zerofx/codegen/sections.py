"""Functions of an emitted file that move blocks between parcels and registers.

`parts` are the names of a tile of blocks, or of its two halves.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from zerofx.codegen import arithmetic
from zerofx.codegen.arithmetic import Lines, code_name
from zerofx.codegen.blocks import KEPT, LIMIT, NEW
from zerofx.ir.parcels import Codec


@dataclasses.dataclass(frozen=True)
class Section:
    """Where blocks lie in a parcel.

    Attributes:
        codec: how they are written.
        num_blocks: of the parcel.
        parts: names of a tile.
        width: numbers of a block in each part.
    """

    codec: Codec
    num_blocks: int
    parts: tuple[str, ...]
    width: int

    def reader(self, name: str, num_sources: int = 1) -> Lines:
        """A function that decodes blocks; of several sources, their shares of a mean."""
        share = arithmetic.share(num_sources)
        body = ['"""Decoded blocks of a parcel."""']
        for code, at in self._codes():
            body += [f"{code} = tl.load(parcel + {at}, mask=used, other=0)"]
        body += [f"params = {self._params()}"]
        body += [f"scale = tl.load(params, mask=used, other=0.0){share}"]
        if not self.codec.symmetric:
            body += [f"low = tl.load(params + {self._slots}, mask=used, other=0.0){share}"]
        body += [*arithmetic.decode(self.codec, self.parts), f"return {', '.join(self.parts)}"]
        return function(name, "parcel, block, columns, used", body)

    def writer(self, name: str, *, back: bool = False) -> Lines:
        """A function that encodes blocks; with `back` it returns what readers will decode."""
        given = list(self.parts)
        if self.codec.rounding == "stochastic":
            given += [f"noise_{part}" for part in self.parts]
        what = "; returns what they decode to" if back else ""
        body = [f'"""Encode blocks into a parcel{what}."""']
        body += arithmetic.encode(self.codec, self.parts)
        for code, at in self._codes():
            body += [f"tl.store(parcel + {at}, {code}, mask=used)"]
        body += [f"params = {self._params()}", "tl.store(params, scale, mask=used)"]
        if not self.codec.symmetric:
            body += [f"tl.store(params + {self._slots}, low, mask=used)"]
        if back:
            body += arithmetic.decode(self.codec, self.parts)
            body += [f"return {', '.join(self.parts)}"]
        return function(name, f"parcel, block, columns, used, {', '.join(given)}", body)

    @property
    def _slots(self) -> int:
        return self.codec.num_slots(self.num_blocks)

    def _codes(self) -> list[tuple[str, str]]:
        """What holds codes, and where they lie."""
        stored = self.parts[:1] if self.codec.code == "int4" else self.parts
        return [(code_name(self.codec, part, self.parts), self._offset(part)) for part in stored]

    def _offset(self, part: str) -> str:
        shift = f" + {self.width}" if part == "right" and self.codec.code != "int4" else ""
        return f"block * {self.codec.block_bytes} + columns{shift}"

    def _params(self) -> str:
        return params_of("parcel", self.num_blocks * self.codec.block_bytes)


def params_of(parcel: str, end: int) -> str:
    """Where parameters of blocks lie, behind `end` bytes of codes."""
    return f"({parcel} + {end}).to(tl.pointer_type(tl.float32)) + block"


def mean_blocks(wires: Sequence[int], parts: Sequence[str], *, wide: bool) -> Lines:
    """A function: the mean over the sources, added in their order.

    Args:
        wires: sources, parcels of each, bytes of a parcel.
        parts: names of a tile.
        wide: whether 32 bits are too few for addresses.
    """
    names, (num_sources, num_parcels, size) = ", ".join(parts), wires
    more = ", ".join(f"more_{part}" for part in parts)
    loop, at = over_sources(1, num_sources, num_parcels * size, wide=wide)
    body = [
        f'"""Mean over the parcels of {num_sources} sources, added in their order."""',
        f"{names} = read_blocks(parcel, block, columns, used)",
        loop,
        f"    {more} = read_blocks({at}, block, columns, used)",
        *(f"    {part} += more_{part}" for part in parts),
        *(line for part in parts for line in arithmetic.divided(num_sources, part)),
        f"return {names}",
    ]
    return function("mean_blocks", "parcel, block, columns, used", body)


def over_sources(first: int, num_sources: int, stride: int, *, wide: bool) -> tuple[str, str]:
    """The line that begins a loop over sources from `first` on, and where a source's parcel lies.

    Wires lie `stride` bytes apart; `wide` says whether 32 bits are too few for addresses.
    """
    # A short loop is unrolled, so that its loads are under way together.
    counter = "tl.static_range" if num_sources <= 8 else "range"
    source = "tl.cast(source, tl.int64)" if wide else "source"
    numbers = f"{first}, {num_sources}" if first else str(num_sources)
    return f"for source in {counter}({numbers}):", f"parcel + {source} * {stride}"


def add_errors(parts: Sequence[str]) -> Lines:
    """A function: what `zerofx.codegen.blocks.with_errors` does."""
    names, old = ", ".join(parts), ", ".join(f"old_{part}" for part in parts)
    body = [
        '"""Blocks with the errors of earlier ones added, and what was added."""',
        f"{old} = read_errors(parcel, block, columns, used)",
        *arithmetic.reduced("top", "max", [f"tl.abs({part})" for part in parts]),
        *(
            f"old_{part} = tl.where(tl.abs(old_{part}) > top * {LIMIT!r}, 0.0, old_{part})"
            for part in parts
        ),
        f"return {', '.join(f'{part} + old_{part}' for part in parts)}, {old}",
    ]
    return function("add_errors", f"parcel, block, columns, used, {names}", body)


def feed_back(parts: Sequence[str], given: Sequence[str]) -> Lines:
    """Lines that write blocks with the errors of earlier ones, and then the new errors.

    Args:
        parts: names of a tile.
        given: what `write_blocks` takes: the parts, and noise.
    """
    names, old = ", ".join(parts), ", ".join(f"old_{part}" for part in parts)
    back, new = ", ".join(f"back_{part}" for part in parts), ", ".join(f"new_{p}" for p in parts)
    lines = [f"{names}, {old} = add_errors(kept, block, columns, used, {names})"]
    write = f"{back} = write_blocks(parcel, block, columns, used, {', '.join(given)})"
    lines += call(write)
    lines += ["# Blocks that are not finite come back as NaN, and leave no errors."]
    for part in parts:
        lines += [f"new_{part} = {KEPT!r} * old_{part} + {NEW!r} * ({part} - back_{part})"]
        lines += [f"new_{part} = tl.where(back_{part} == back_{part}, new_{part}, 0.0)"]
    lines += ["# All threads have read the old errors before one of them writes new ones."]
    return [*lines, "tl.debug_barrier()", f"write_errors(kept, block, columns, used, {new})"]


def function(name: str, parameters: str, body: Lines, decorator: str = "@triton.jit") -> Lines:
    """A definition, wrapped where it is long."""
    opening = textwrap.wrap(f"def {name}({parameters}):", 100, subsequent_indent="    " * 2)
    return [decorator, *opening, *indented(body), "", ""]


def call(line: str) -> Lines:
    """A statement, wrapped where it is long."""
    return textwrap.wrap(line, 90, subsequent_indent="    ")


def indented(lines: Lines) -> Lines:
    """One level more."""
    return [f"    {line}" for line in lines]
