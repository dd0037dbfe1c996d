"""Repack: parcels become parcels, the mean of 16 sources, quantized again, in one launch.

Written by zerofx for one bucket; do not edit.

    codec    int4x256, then int8x256.stochastic
    reads    uint8[16, 4, 25344]
    writes   uint8[4, 49920]
    parcel   192 blocks of 128 B, then 192 scales
    bytes    1821696 in all
    launch   48 programs of 4 warps, 16 blocks each
"""

import triton
import triton.language as tl


@triton.jit
def scrambled(x):
    """A permutation of 32-bit integers that looks random ("lowbias32")."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def uniform(position, seed):
    """Numbers in (0, 1) with 23 random bits, from the seed and the position alone."""
    bits = scrambled(position.to(tl.uint32) ^ scrambled(seed.to(tl.uint32)))
    return ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def read_blocks(parcel, block, columns, used):
    """Decoded blocks of a parcel."""
    code = tl.load(parcel + block * 128 + columns, mask=used, other=0)
    params = (parcel + 24576).to(tl.pointer_type(tl.float32)) + block
    scale = tl.load(params, mask=used, other=0.0) * 0.0625
    both = code.to(tl.int32)
    left = ((both << 28) >> 28).to(tl.float32) * scale
    right = ((both << 24) >> 28).to(tl.float32) * scale
    return left, right


@triton.jit
def mean_blocks(parcel, block, columns, used):
    """Mean over the parcels of 16 sources, added in their order."""
    left, right = read_blocks(parcel, block, columns, used)
    for source in range(1, 16):
        more_left, more_right = read_blocks(parcel + source * 101376, block, columns, used)
        left += more_left
        right += more_right
    return left, right


@triton.jit
def write_blocks(parcel, block, columns, used, left, right, noise_left, noise_right):
    """Encode blocks into a parcel."""
    # As integers, magnitudes keep their order, and infinity and NaN exceed all others.
    top = tl.max(tl.abs(left).to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    top = tl.maximum(top, tl.max(tl.abs(right).to(tl.int32, bitcast=True), axis=1, keep_dims=True))
    finite = top < 0x7F800000
    reach = top.to(tl.float32, bitcast=True)
    scale = tl.maximum(reach * 0.007874014787375927, 1.1754943508222875e-38)
    scale = tl.where(finite, scale, float("nan"))
    inverse = tl.where(finite, tl.div_rn(1.0, scale), 0.0)
    left = tl.where(finite, left * inverse, 0.0)
    left = tl.floor(left + noise_left)
    left = tl.minimum(tl.maximum(left, -127.0), 127.0).to(tl.int32)
    right = tl.where(finite, right * inverse, 0.0)
    right = tl.floor(right + noise_right)
    right = tl.minimum(tl.maximum(right, -127.0), 127.0).to(tl.int32)
    code_left = left.to(tl.uint8)
    code_right = right.to(tl.uint8)
    tl.store(parcel + block * 256 + columns, code_left, mask=used)
    tl.store(parcel + block * 256 + columns + 128, code_right, mask=used)
    params = (parcel + 49152).to(tl.pointer_type(tl.float32)) + block
    tl.store(params, scale, mask=used)


@triton.jit(do_not_specialize=["seed"])
def repack(wires, wire, seed):
    program = tl.program_id(0)
    chunk = program // 12
    tile = program % 12
    rows = tl.arange(0, 16)[:, None]
    columns = tl.arange(0, 128)[None, :]
    block = rows + 16*tile
    used = block < 192
    parcel = wires + 25344*chunk
    left, right = mean_blocks(parcel, block, columns, used)
    position = block * 256 + columns + 49152*chunk
    noise_left = uniform(position, seed)
    noise_right = uniform(position + 128, seed)
    parcel = wire + 49920*chunk
    write_blocks(parcel, block, columns, used, left, right, noise_left, noise_right)
