"""Unpack: parcels become tensors, in one launch.

Written by zerofx for one bucket; do not edit.

    codec    fp8x128
    reads    uint8[1, 4, 50688]
    writes   1 tensors, see below
    parcel   384 blocks of 128 B, then 384 scales
    bytes    595968 in all
    launch   48 programs of 4 warps, 32 blocks each

        tensor           dtype     elements  chunk  blocks  tiles
    t0  layers.0.weight  bfloat16  196608    49152  0–383   0–11
"""

import triton
import triton.language as tl


@triton.jit
def from_e4m3(code):
    """The number that an fp8 e4m3 code stands for: its bits, as those of fp32, are 2⁻¹²⁰ of it."""
    bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 20) & ~0x78000000
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def read_blocks(parcel, block, columns, used):
    """Decoded blocks of a parcel."""
    code = tl.load(parcel + block * 128 + columns, mask=used, other=0)
    params = (parcel + 49152).to(tl.pointer_type(tl.float32)) + block
    scale = tl.load(params, mask=used, other=0.0)
    x = from_e4m3(code) * scale
    return x


@triton.jit
def unpack(wires, t0):
    program = tl.program_id(0)
    chunk = program // 12
    tile = program % 12
    rows = tl.arange(0, 32)[:, None]
    columns = tl.arange(0, 128)[None, :]
    # layers.0.weight
    block = rows + 32*tile
    used = block < 384
    parcel = wires + 50688*chunk
    x = read_blocks(parcel, block, columns, used)
    # layers.0.weight
    inside = columns + 128*rows + 4096*tile
    place_t0 = t0 + 49152*chunk + inside
    tl.store(place_t0, x.to(tl.bfloat16))
