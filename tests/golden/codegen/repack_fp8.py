"""Repack: parcels become parcels, the mean of 2 sources, quantized again, in one launch.

Written by zerofx for one bucket; do not edit.

    codec    fp8x256
    reads    uint8[2, 2, 50192]
    writes   uint8[2, 50192]
    parcel   193 blocks of 256 B, then 196 scales
    bytes    301152 in all
    launch   50 programs of 4 warps, 8 blocks each
    device   compute capability 8.9 or higher, for its instructions of fp8
"""

import triton
import triton.language as tl


@triton.jit
def to_e4m3(x):
    """fp8 e4m3 of numbers up to 448, to the nearest, ties to even."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(code):
    """The number that an fp8 e4m3 code stands for."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def read_blocks(parcel, block, columns, used):
    """Decoded blocks of a parcel."""
    code = tl.load(parcel + block * 256 + columns, mask=used, other=0)
    params = (parcel + 49408).to(tl.pointer_type(tl.float32)) + block
    scale = tl.load(params, mask=used, other=0.0) * 0.5
    x = from_e4m3(code) * scale
    return x


@triton.jit
def mean_blocks(parcel, block, columns, used):
    """Mean over the parcels of 2 sources, added in their order."""
    x = read_blocks(parcel, block, columns, used)
    for source in tl.static_range(1, 2):
        more_x = read_blocks(parcel + source * 100384, block, columns, used)
        x += more_x
    return x


@triton.jit
def write_blocks(parcel, block, columns, used, x):
    """Encode blocks into a parcel."""
    # As integers, magnitudes keep their order, and infinity and NaN exceed all others.
    top = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    finite = top < 0x7F800000
    reach = top.to(tl.float32, bitcast=True)
    scale = tl.maximum(reach * 0.002232142724096775, 1.1754943508222875e-38)
    scale = tl.where(finite, scale, float("nan"))
    inverse = tl.where(finite, tl.div_rn(1.0, scale), 0.0)
    x = tl.where(finite, x * inverse, 0.0)
    x = to_e4m3(x)
    code = x.to(tl.uint8)
    tl.store(parcel + block * 256 + columns, code, mask=used)
    params = (parcel + 49408).to(tl.pointer_type(tl.float32)) + block
    tl.store(params, scale, mask=used)


@triton.jit
def repack(wires, wire):
    program = tl.program_id(0)
    chunk = program // 25
    tile = program % 25
    rows = tl.arange(0, 8)[:, None]
    columns = tl.arange(0, 256)[None, :]
    block = rows + 8*tile
    used = block < 193
    parcel = wires + 50192*chunk
    x = mean_blocks(parcel, block, columns, used)
    parcel = wire + 50192*chunk
    write_blocks(parcel, block, columns, used, x)
    if tile == 24:
        # Slots beyond the last block, as of a block of zeros.
        slot = 193 + tl.arange(0, 4)
        params = (parcel + 49408).to(tl.pointer_type(tl.float32)) + slot
        tl.store(params, tl.full([4], 1.1754943508222875e-38, tl.float32), mask=slot < 196)
