"""Pack: tensors become parcels, quantized, in one launch.

Written by zerofx for one bucket; do not edit.

    codec    int8x256
    reads    1 tensors, see below
    writes   uint8[1, 49920]
    parcel   192 blocks of 256 B, then 192 scales
    bytes    148224 in all
    launch   12 programs of 4 warps, 16 blocks each

        tensor           dtype     elements  chunk  blocks  tiles
    t0  layers.0.weight  bfloat16  49152     49152  0–191   0–11
"""

import triton
import triton.language as tl


@triton.jit
def write_blocks(parcel, block, columns, used, x):
    """Encode blocks into a parcel."""
    # As integers, magnitudes keep their order, and infinity and NaN exceed all others.
    top = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    finite = top < 0x7F800000
    reach = top.to(tl.float32, bitcast=True)
    scale = tl.maximum(reach * 0.007874014787375927, 1.1754943508222875e-38)
    scale = tl.where(finite, scale, float("nan"))
    inverse = tl.where(finite, tl.div_rn(1.0, scale), 0.0)
    # Added to 1.5 · 2²³, a number leaves its nearest integer in the low bits.
    x = tl.where(finite, x * inverse, 0.0)
    x = (x + 12582912.0).to(tl.int32, bitcast=True)
    code = x.to(tl.uint8)
    tl.store(parcel + block * 256 + columns, code, mask=used)
    params = (parcel + 49152).to(tl.pointer_type(tl.float32)) + block
    tl.store(params, scale, mask=used)


@triton.jit
def pack(t0, wire):
    program = tl.program_id(0)
    tile = program
    rows = tl.arange(0, 16)[:, None]
    columns = tl.arange(0, 256)[None, :]
    # layers.0.weight
    block = rows + 16*tile
    used = block < 192
    inside = columns + 256*rows + 4096*tile
    place_t0 = t0 + inside
    x = tl.load(place_t0).to(tl.float32)
    parcel = wire
    write_blocks(parcel, block, columns, used, x)
