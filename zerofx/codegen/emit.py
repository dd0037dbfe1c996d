"""From a `KernelSpec` to the source of a Triton kernel for exactly that bucket.

The file is complete: it needs Triton and nothing of zerofx, every size in it is a number, and a
person can read it. Each program handles a tile of blocks of one tensor; absolute maxima stay in
registers, and every byte is read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable

from zerofx.codegen import arithmetic, words
from zerofx.codegen.arithmetic import Lines, names_of
from zerofx.codegen.blocks import TINY
from zerofx.codegen.expressions import Expr, Scope, code, shifted
from zerofx.codegen.header import header, shown
from zerofx.codegen.many import merged, selected
from zerofx.codegen.operands import takes_seed
from zerofx.codegen.sections import (
    Section,
    add_errors,
    call,
    feed_back,
    function,
    indented,
    mean_blocks,
)
from zerofx.codegen.tiles import Stretch, Tiling, codecs_of, tiling_of
from zerofx.ir.kernels import KernelSpec, Pack, Repack, Unpack, errors_of
from zerofx.ir.parcels import Codec, Parcels


def kernel_name(spec: KernelSpec) -> str:
    """Name of the function to launch: `pack`, `unpack` or `repack`."""
    return type(spec).__name__.lower()


def emit(spec: KernelSpec, *, fp8: bool = False) -> str:
    """The source file: the same text for equal arguments.

    Its function takes pointers to inputs and outputs, in the order of the spec, and the seed if
    codes are rounded stochastically.

    Args:
        spec: what it does.
        fp8: whether the device has instructions for fp8, as from compute capability 8.9 on; others
            make and read its codes as integers.
    """
    return "\n".join(_Emitter(spec, fp8).lines()).rstrip() + "\n"


class _Emitter:
    """Writes the parts of one file."""

    def __init__(self, spec: KernelSpec, fp8: bool) -> None:
        self.spec = spec
        self.fp8 = fp8 and "fp8" in (codec.code for codec in codecs_of(spec))
        self.tiling: Tiling = tiling_of(spec)
        self.stretches = merged(self.tiling.stretches)
        self.codec, self.out = codecs_of(spec)
        self.feedback = bool(errors_of(spec))
        self.parts = names_of(self.tiling.num_parts)
        self.width = self.codec.block // self.tiling.num_parts
        if self.tiling.stripes:
            self.parts = words.names_of(self.tiling.stripes)
            self.width = self.codec.block // len(self.parts)
        self.num_sources = 1 if isinstance(spec, Pack) else spec.num_sources
        self.scope = Scope(
            program=self.tiling.num_programs,
            chunk=self.tiling.num_parcels,
            tile=self.tiling.num_tiles,
            rows=self.tiling.rows,
            columns=self.width,
        )

    def lines(self) -> Lines:
        lines = [*header(self.spec, self.tiling, self.fp8), ""]
        lines += ["import triton", "import triton.language as tl", "", ""]
        lines += self._words() if self.tiling.stripes else self._sections()
        return lines + self._kernel()

    def _sections(self) -> Lines:
        """Definitions that the kernel relies on."""
        reads, writes = not isinstance(self.spec, Pack), not isinstance(self.spec, Unpack)
        decoded = [self.codec] * reads + [self.out] * self.feedback
        lines = arithmetic.functions(decoded, self.out if writes else None, fp8=self.fp8)
        blocks = self.tiling.num_blocks, self.parts, self.width
        if reads:
            lines += Section(self.codec, *blocks).reader("read_blocks", self.num_sources)
        if self.num_sources > 1:
            lines += mean_blocks(self.spec.inputs[0][0], self.parts, wide=self.tiling.wide)
        if writes:
            lines += Section(self.out, *blocks).writer("write_blocks", back=self.feedback)
        if self.feedback:
            errors = Section(self.out.errors, *blocks)
            lines += [*errors.reader("read_errors"), *add_errors(self.parts)]
            lines += errors.writer("write_errors")
        return lines

    def _words(self) -> Lines:
        """Definitions where blocks come in words."""
        return words.functions(self.codec, self.out, self.tiling, self.spec.inputs[0][0])

    def _kernel(self) -> Lines:
        spec, seeded = self.spec, takes_seed(self.spec)
        tensors = (
            []
            if isinstance(spec, Repack)
            else [f"t{number}" for number in range(len(spec.parcels.members))]
        )
        wires = {"Pack": ["wire"], "Unpack": ["wires"], "Repack": ["wires", "wire"]}
        own = wires[type(spec).__name__]
        operands = [*own, *tensors] if isinstance(spec, Unpack) else [*tensors, *own]
        operands += ["errors"] * self.feedback + ["seed"] * seeded
        decorator = '@triton.jit(do_not_specialize=["seed"])' if seeded else "@triton.jit"
        body = self._position()
        body += self._load() if isinstance(spec, Pack) else self._read()
        body += self._store() if isinstance(spec, Unpack) else self._write()
        return function(kernel_name(spec), ", ".join(operands), body, decorator)

    def _position(self) -> Lines:
        """Where this program is."""
        s, t = self.scope, self.tiling
        wide = ".to(tl.int64)" if t.wide else ""
        lines = [f"program = tl.program_id(0){wide}"]
        if t.num_parcels > 1:
            lines += [f"chunk = {code(s.div(s['program'], t.num_tiles))}"]
        if t.num_tiles > 1:
            lines += [f"tile = {code(s.mod(s['program'], t.num_tiles))}"]
        if self.stretches != t.stretches:
            lines += selected(t.stretches)
        lines += [f"rows = tl.arange(0, {t.rows})[:, None]"]
        return [*lines, f"columns = tl.arange(0, {self.width})[None, :]"]

    def _load(self) -> Lines:
        """Blocks of the tensor that this tile belongs to."""

        def one(stretch: Stretch) -> Lines:
            lines, place, mask = self._element(stretch)
            for number, part in enumerate(self.parts):
                shift = number * self.width
                where = f", mask={shifted('inside', shift)} < {mask}, other=0.0" if mask else ""
                lines += [f"{part} = tl.load({shifted(place, shift)}{where}).to(tl.float32)"]
            return [*self._block_of(stretch), *lines]

        return self._choose(one)

    def _read(self) -> Lines:
        """Blocks of the parcel, or their mean."""
        if self.stretches:
            lines = self._choose(self._block_of)
        else:
            lines = [f"block = {code(self._row())}", f"used = block < {self.tiling.num_blocks}"]
        how = "mean_blocks" if self.num_sources > 1 else "read_blocks"
        lines += [f"parcel = {self._parcel('wires', self.spec.inputs[0][0][2])}"]
        return [*lines, *call(f"{', '.join(self.parts)} = {how}(parcel, block, columns, used)")]

    def _store(self) -> Lines:
        def one(stretch: Stretch) -> Lines:
            lines, place, mask = self._element(stretch)
            dtype = str(stretch.member.dtype).removeprefix("torch.")
            for number, part in enumerate(self.parts):
                shift = number * self.width
                where = f", mask={shifted('inside', shift)} < {mask}" if mask else ""
                value = part if dtype == "float32" else f"{part}.to(tl.{dtype})"
                lines += [f"tl.store({shifted(place, shift)}, {value}{where})"]
            return lines

        return self._choose(one)

    def _write(self) -> Lines:
        size, t = self.spec.outputs[0][0][1], self.tiling
        lines, given = list[str](), list(self.parts)
        if takes_seed(self.spec):
            inside = f"block * {self.out.block} + columns"
            begin = self.scope["chunk"] * t.num_blocks * self.out.block
            lines += [f"position = {shifted(inside, begin)}"]
            for number, part in enumerate(self.parts):
                at = shifted("position", number * self.width)
                lines += [f"noise_{part} = uniform({at}, seed)"]
            given += [f"noise_{part}" for part in self.parts]
        lines += [f"parcel = {self._parcel('wire', size)}"]
        if not self.feedback:
            lines += call(f"write_blocks(parcel, block, columns, used, {', '.join(given)})")
            return lines + self._empty_slots("parcel", self.out)
        lines += [f"kept = {self._parcel('errors', self.spec.outputs[1][0][1])}"]
        lines += feed_back(self.parts, given)
        lines += self._empty_slots("parcel", self.out)
        return lines + self._empty_slots("kept", self.out.errors)

    def _empty_slots(self, parcel: str, codec: Codec) -> Lines:
        """The last tile writes the slots beyond the last block, so that no byte stays unwritten."""
        num_blocks, num_slots = self.tiling.num_blocks, codec.num_slots(self.tiling.num_blocks)
        if num_slots == num_blocks:
            return []
        end = num_blocks * codec.block_bytes
        lines = [
            "# Slots beyond the last block, as of a block of zeros.",
            f"slot = {num_blocks} + tl.arange(0, 4)",
            f"params = ({parcel} + {end}).to(tl.pointer_type(tl.float32)) + slot",
            f"tl.store(params, tl.full([4], {TINY!r}, tl.float32), mask=slot < {num_slots})",
        ]
        if not codec.symmetric:
            zeros = "tl.zeros([4], tl.float32)"
            lines += [f"tl.store(params + {num_slots}, {zeros}, mask=slot < {num_slots})"]
        if self.tiling.num_tiles == 1:
            return lines
        return [f"if tile == {self.tiling.num_tiles - 1}:", *indented(lines)]

    def _choose(self, write: Callable[[Stretch], Lines]) -> Lines:
        """What `write` makes for each tensor, behind the test for its tiles."""
        stretches, lines = self.stretches, list[str]()
        for number, stretch in enumerate(stretches):
            comment = f"# {shown(stretch.member.name)}"
            if len(stretches) == 1:
                return [comment, *write(stretch)]
            end = stretch.first_tile + stretch.num_tiles
            last = number == len(stretches) - 1
            test = "else:" if last else f"{'elif' if number else 'if'} tile < {end}:"
            lines += [f"{test}  {comment}", *indented(write(stretch))]
        return lines

    def _row(self, first_tile: int = 0) -> Expr:
        """A tile's blocks, counted from `first_tile`."""
        return (self.scope["tile"] - first_tile) * self.tiling.rows + self.scope["rows"]

    def _block_of(self, stretch: Stretch) -> Lines:
        block = self._row(stretch.first_tile) + stretch.first_block
        end = stretch.first_block + stretch.num_blocks
        return [f"block = {code(block)}", f"used = block < {end}"]

    def _element(self, stretch: Stretch) -> tuple[Lines, str, str]:
        """Which elements of its chunk a tile has; names of their addresses and of their bound."""
        member, block = stretch.member, self.codec.block
        inside = self._row(stretch.first_tile) * block + self.scope["columns"]
        start = shifted(stretch.name, self.scope["chunk"] * member.chunk)
        place = f"place_{stretch.name}"
        lines = [f"inside = {code(inside)}", f"{place} = {start} + inside"]
        each = self.tiling.stretches if len(self.stretches) == 1 else (stretch,)
        if any(one.member.numel < one.member.chunk * self.tiling.num_parcels for one in each):
            left = code(member.numel - self.scope["chunk"] * member.chunk)
            return [*lines, f"limit = tl.minimum({left}, {member.chunk})"], place, "limit"
        tile = self.tiling.rows * block
        is_covered = all(one.num_tiles * tile == one.member.chunk for one in each)
        return lines, place, "" if is_covered else str(member.chunk)

    def _parcel(self, wire: str, size: int) -> str:
        """The parcel of this chunk."""
        row = self.scope["chunk"]
        if not isinstance(self.spec, Repack):
            row = place_of(row, self.scope, self.spec.parcels)
        return shifted(wire, row * size)


def place_of(chunk: Expr, scope: Scope, parcels: Parcels) -> Expr:
    """The row of a chunk, which is `zerofx.ir.parcels.place` of it."""
    num_local, num_nodes = parcels.num_local, parcels.num_nodes
    return scope.mod(chunk, num_local) * num_nodes + scope.div(chunk, num_local)
