"""Every kernel in plain torch: what a `KernelSpec` means, and what CPU ranks run.

A spec is cut into rectangles of whole blocks, and the short ends of tensors; each goes through one
of three functions. These may be compiled by Inductor: one compilation serves all sizes, so a model
needs a handful of them, however many buckets it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zerofx.codegen.blocks import TINY, code_dtype
from zerofx.codegen.calls import Calls
from zerofx.codegen.functions import function_for
from zerofx.codegen.operands import as_int32, check_operands, takes_seed
from zerofx.ir.kernels import KernelSpec, Pack, Repack, Unpack, num_blocks
from zerofx.ir.parcels import Codec, Member, Parcels


@dataclasses.dataclass(frozen=True)
class Reference:
    """A kernel in plain torch, on any device.

    Attributes:
        spec: what it does.
        compiled: through Inductor, which vectorises it; otherwise op by op, with the same result.
    """

    spec: KernelSpec
    compiled: bool = False
    _calls: dict[torch.device, Calls] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], seed: int = 0) -> None:
        """Read `inputs` and write every byte of `outputs`; the spec says their shapes.

        Args:
            inputs: contiguous.
            outputs: contiguous; they share no memory with the inputs. Errors of feedback, the
                last one, are read too.
            seed: for stochastic rounding; ranks and steps should differ in it.

        Raises:
            KernelError: an operand is not what the spec says.
        """
        check_operands(self.spec, inputs, outputs)
        if num_blocks(self.spec) == 0:
            return
        device = outputs[0].device
        if device not in self._calls:
            self._calls[device] = _Rectangles(self.spec, self.compiled, device).calls
        seeds = [_int32(seed, device)] if takes_seed(self.spec) else []
        self._calls[device]([*inputs, *outputs, *seeds])


class _Rectangles:
    """Makes the calls of a kernel; tensors are stand-ins here, see `Calls`.

    Args:
        spec: what it does.
        compiled: whether functions go through Inductor.
        device: of the operands.

    Attributes:
        calls: with inputs, outputs and, if there is one, the seed `int32`.
    """

    def __init__(self, spec: KernelSpec, compiled: bool, device: torch.device) -> None:
        seeds = [((), torch.int32)] if takes_seed(spec) else []
        self.calls = Calls([*spec.inputs, *spec.outputs, *seeds], device)
        self._compiled = compiled
        begin, end = len(spec.inputs), len(spec.inputs) + len(spec.outputs)
        inputs, outputs = self.calls.operands[:begin], self.calls.operands[begin:end]
        self._seeds = self.calls.operands[end:]
        if isinstance(spec, Pack):
            self._pack(spec.parcels, inputs, outputs)
        elif isinstance(spec, Unpack):
            self._unpack(spec.parcels, inputs[0], outputs)
        else:
            self._repack(spec, inputs[0], outputs)

    def _pack(self, parcels: Parcels, tensors: Sequence[Tensor], wires: Sequence[Tensor]) -> None:
        codec, size = parcels.codec, parcels.codec.block
        by_node = [_by_node(wire, parcels) for wire in wires]
        written = self._written(by_node, parcels.num_blocks, codec)
        for member, first, tensor in _placed(parcels, tensors):
            last = first + parcels.blocks_of(member)
            for run in _runs(parcels, member):
                rows = [[each[run.node, run.locals] for each in one] for one in written]
                for values, block in run.pieces(tensor, size):
                    place = slice(first + block, first + block + values.shape[1])
                    into = [each[:, place] for one in rows for each in one]
                    starts = [
                        (chunk * parcels.num_blocks + first + block) * size for chunk in run.chunks
                    ]
                    whole = values
                    if values.shape[-1] < size:
                        whole = self._whole_block(values, size)
                        self.calls.add(_pad, whole, values)
                    self._run("pack", codec, codec, [whole, *into], starts)
                for codes, *params in rows:
                    unused = slice(first + -(-run.count // size), last)
                    self._fill_zeros(codes[:, unused], [param[:, unused] for param in params])

    def _unpack(self, parcels: Parcels, wires: Tensor, tensors: Sequence[Tensor]) -> None:
        codec, size = parcels.codec, parcels.codec.block
        codes, params = _sections(
            _by_node(wires, parcels), parcels.num_blocks, codec, written=False
        )
        for member, first, tensor in _placed(parcels, tensors):
            for run in _runs(parcels, member):
                rows = codes[:, run.node, run.locals], *(p[:, run.node, run.locals] for p in params)
                for values, block in run.pieces(tensor, size):
                    short = values.shape[-1] < size
                    whole = self._whole_block(values, size) if short else values
                    read = [row[:, :, first + block :][:, :, : whole.shape[1]] for row in rows]
                    halves = whole.chunk(2, -1) if codec.code == "int4" else [whole]
                    self._run("unpack", codec, codec, [*read, *halves])
                    if short:
                        self.calls.add(Tensor.copy_, values, whole[..., : values.shape[-1]])

    def _repack(self, spec: Repack, wires: Tensor, out: Sequence[Tensor]) -> None:
        codes, params = _sections(wires, spec.num_blocks, spec.codec, written=False)
        operands = [codes, *(param[..., : spec.num_blocks] for param in params)]
        for into, *scales in self._written(out, spec.num_blocks, spec.out):
            operands += [into, *(scale[:, : spec.num_blocks] for scale in scales)]
        starts = [parcel * spec.num_blocks * spec.out.block for parcel in range(spec.num)]
        self._run("repack", spec.codec, spec.out, operands, starts)

    def _run(
        self,
        kind: str,
        codec: Codec,
        out: Codec,
        operands: list[Tensor],
        starts: Sequence[int] = (),
    ) -> None:
        """One function on one rectangle; `starts` are the positions of its rows' first elements."""
        # The last block of a tensor, and tensors of one block, are not worth a compilation.
        compiled = self._compiled and operands[0].shape[-2] > 1
        device = self.calls.device
        positions = [_int32(starts, device)] if self._seeds else []
        function = function_for(
            kind,
            codec,
            out,
            [*operands, *positions, *self._seeds],
            compiled=compiled,
            device=device,
        )

        def call(*views: Tensor) -> None:
            function(*views[: len(operands)], *positions, *views[len(operands) :])

        self.calls.add(call if positions else function, *operands, *self._seeds)

    def _written(
        self, wires: Sequence[Tensor], num_blocks: int, codec: Codec
    ) -> list[list[Tensor]]:
        """Sections of a wire, and of errors if there are any; slots without a block are filled."""
        sections: list[list[Tensor]] = []
        for wire, kind in zip(wires, (codec, codec.errors), strict=False):
            codes, params = _sections(wire, num_blocks, kind, written=True)
            self._fill_zeros(codes[..., :0, :], [param[..., num_blocks:] for param in params])
            sections.append([codes, *params])
        return sections

    def _fill_zeros(self, codes: Tensor, params: Sequence[Tensor]) -> None:
        """Blocks of zeros, as `encode` writes them."""
        self.calls.add(Tensor.zero_, codes)
        self.calls.add(_fill_tiny, params[0])
        for low in params[1:]:
            self.calls.add(Tensor.zero_, low)

    def _whole_block(self, values: Tensor, size: int) -> Tensor:
        """Memory for one block in place of a short one."""
        return self.calls.scratch((len(values), 1, size), values.dtype)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Neighbouring chunks of one tensor, for one node, that are equally long.

    Attributes:
        node: which.
        chunks: their numbers.
        locals: the places of their ranks in the node.
        start: the tensor's element at which they begin.
        count: elements of each.
    """

    node: int
    chunks: range
    locals: slice
    start: int
    count: int

    def pieces(self, tensor: Tensor, block: int) -> Iterator[tuple[Tensor, int]]:
        """Whole blocks `[chunks, blocks, block]`, then the last short one, each with its place."""
        rows = tensor[self.start :][: len(self.chunks) * self.count].view(
            len(self.chunks), self.count
        )
        num_blocks, rest = divmod(self.count, block)
        if num_blocks:
            yield rows[:, : num_blocks * block].unflatten(1, (num_blocks, block)), 0
        if rest:
            yield rows[:, None, num_blocks * block :], num_blocks


def _runs(parcels: Parcels, member: Member) -> Iterator[_Run]:
    """All chunks of a member: on each node the full ones, at most one short one, the empty ones."""
    for node in range(parcels.num_nodes):
        begin, end = node * parcels.num_local, (node + 1) * parcels.num_local
        whole = member.numel // member.chunk if member.chunk else 0
        full = min(max(whole, begin), end)
        short = min(full + 1, end) if member.count(full) else full
        for low, high in ((begin, full), (full, short), (short, end)):
            if low < high:
                local = slice(low - begin, high - begin)
                yield _Run(node, range(low, high), local, low * member.chunk, member.count(low))


def _placed(parcels: Parcels, tensors: Sequence[Tensor]) -> Iterator[tuple[Member, int, Tensor]]:
    """Members with elements, their first blocks and their tensors."""
    for member, first, tensor in zip(parcels.members, parcels.first_blocks, tensors, strict=True):
        if member.chunk:
            yield member, first, tensor


def _by_node(wire: Tensor, parcels: Parcels) -> Tensor:
    """`[…, num, bytes]` as `[…, num_nodes, num_local, bytes]`, chunks in their natural order."""
    return wire.unflatten(-2, (parcels.num_local, parcels.num_nodes)).transpose(-3, -2)


def _sections(
    wire: Tensor, num_blocks: int, codec: Codec, *, written: bool
) -> tuple[Tensor, list[Tensor]]:
    """Views of parcels: codes `[…, num_blocks, block_bytes]`, and parameters `[…, num_slots]`."""
    end = num_blocks * codec.block_bytes
    codes = wire[..., :end].unflatten(-1, (num_blocks, codec.block_bytes))
    return codes.view(code_dtype(codec, written=written)), list(
        wire[..., end:].view(torch.float32).chunk(codec.num_params, -1)
    )


def _int32(numbers: int | Sequence[int], device: torch.device) -> Tensor:
    """A number, or several, of which the lowest 32 bits count."""
    low = as_int32(numbers) if isinstance(numbers, int) else [as_int32(each) for each in numbers]
    return torch.tensor(low, dtype=torch.int32, device=device)


def _pad(block: Tensor, values: Tensor) -> None:
    """A short block, filled up with zeros."""
    block[..., : values.shape[-1]].copy_(values)
    block[..., values.shape[-1] :].zero_()


def _fill_tiny(scales: Tensor) -> None:
    scales.fill_(TINY)
