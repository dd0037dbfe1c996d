"""Pack: tensors become parcels, quantized, in one launch.

Written by zerofx for one bucket; do not edit.

    codec    int4x256.feedback
    reads    2 tensors, see below
    writes   uint8[4, 25488]
    errors   uint8[4, 50192], read and written
    parcel   193 blocks of 128 B, then 196 scales
    order    chunk p is row p % 2 * 2 + p // 2
    bytes    1292992 in all
    launch   100 programs of 4 warps, 8 blocks each

        tensor           dtype    elements  chunk  blocks  tiles
    t0  layers.0.weight  float32  196608    49152  0–191   0–23
    t1  layers.0.bias    float32  768       192    192     24
"""

import triton
import triton.language as tl


@triton.jit
def write_blocks(parcel, block, columns, used, left, right):
    """Encode blocks into a parcel; returns what they decode to."""
    # As integers, magnitudes keep their order, and infinity and NaN exceed all others.
    top = tl.max(tl.abs(left).to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    top = tl.maximum(top, tl.max(tl.abs(right).to(tl.int32, bitcast=True), axis=1, keep_dims=True))
    finite = top < 0x7F800000
    reach = top.to(tl.float32, bitcast=True)
    scale = tl.maximum(reach * 0.1428571343421936, 1.1754943508222875e-38)
    # Without its last three bits, products with codes are exact.
    scale = (scale.to(tl.int32, bitcast=True) & ~7).to(tl.float32, bitcast=True)
    scale = tl.where(finite, scale, float("nan"))
    inverse = tl.where(finite, tl.div_rn(1.0, scale), 0.0)
    # Added to 1.5 · 2²³, a number leaves its nearest integer in the low bits.
    left = tl.where(finite, left * inverse, 0.0)
    left = (left + 12582912.0).to(tl.int32, bitcast=True)
    right = tl.where(finite, right * inverse, 0.0)
    right = (right + 12582912.0).to(tl.int32, bitcast=True)
    code = ((left & 15) | ((right & 15) << 4)).to(tl.uint8)
    tl.store(parcel + block * 128 + columns, code, mask=used)
    params = (parcel + 24704).to(tl.pointer_type(tl.float32)) + block
    tl.store(params, scale, mask=used)
    both = code.to(tl.int32)
    left = ((both << 28) >> 28).to(tl.float32) * scale
    right = ((both << 24) >> 28).to(tl.float32) * scale
    return left, right


@triton.jit
def read_errors(parcel, block, columns, used):
    """Decoded blocks of a parcel."""
    code_left = tl.load(parcel + block * 256 + columns, mask=used, other=0)
    code_right = tl.load(parcel + block * 256 + columns + 128, mask=used, other=0)
    params = (parcel + 49408).to(tl.pointer_type(tl.float32)) + block
    scale = tl.load(params, mask=used, other=0.0)
    left = code_left.to(tl.int8, bitcast=True).to(tl.float32) * scale
    right = code_right.to(tl.int8, bitcast=True).to(tl.float32) * scale
    return left, right


@triton.jit
def add_errors(parcel, block, columns, used, left, right):
    """Blocks with the errors of earlier ones added, and what was added."""
    old_left, old_right = read_errors(parcel, block, columns, used)
    top = tl.max(tl.abs(left), axis=1, keep_dims=True)
    top = tl.maximum(top, tl.max(tl.abs(right), axis=1, keep_dims=True))
    old_left = tl.where(tl.abs(old_left) > top * 0.25, 0.0, old_left)
    old_right = tl.where(tl.abs(old_right) > top * 0.25, 0.0, old_right)
    return left + old_left, right + old_right, old_left, old_right


@triton.jit
def write_errors(parcel, block, columns, used, left, right):
    """Encode blocks into a parcel."""
    # As integers, magnitudes keep their order, and infinity and NaN exceed all others.
    top = tl.max(tl.abs(left).to(tl.int32, bitcast=True), axis=1, keep_dims=True)
    top = tl.maximum(top, tl.max(tl.abs(right).to(tl.int32, bitcast=True), axis=1, keep_dims=True))
    finite = top < 0x7F800000
    reach = top.to(tl.float32, bitcast=True)
    scale = tl.maximum(reach * 0.007874014787375927, 1.1754943508222875e-38)
    scale = tl.where(finite, scale, float("nan"))
    inverse = tl.where(finite, tl.div_rn(1.0, scale), 0.0)
    # Added to 1.5 · 2²³, a number leaves its nearest integer in the low bits.
    left = tl.where(finite, left * inverse, 0.0)
    left = (left + 12582912.0).to(tl.int32, bitcast=True)
    right = tl.where(finite, right * inverse, 0.0)
    right = (right + 12582912.0).to(tl.int32, bitcast=True)
    code_left = left.to(tl.uint8)
    code_right = right.to(tl.uint8)
    tl.store(parcel + block * 256 + columns, code_left, mask=used)
    tl.store(parcel + block * 256 + columns + 128, code_right, mask=used)
    params = (parcel + 49408).to(tl.pointer_type(tl.float32)) + block
    tl.store(params, scale, mask=used)


@triton.jit
def pack(t0, t1, wire, errors):
    program = tl.program_id(0)
    chunk = program // 25
    tile = program % 25
    rows = tl.arange(0, 8)[:, None]
    columns = tl.arange(0, 128)[None, :]
    if tile < 24:  # layers.0.weight
        block = rows + 8*tile
        used = block < 192
        inside = columns + 256*rows + 2048*tile
        place_t0 = t0 + 49152*chunk + inside
        left = tl.load(place_t0).to(tl.float32)
        right = tl.load(place_t0 + 128).to(tl.float32)
    else:  # layers.0.bias
        block = rows + 8*tile
        used = block < 193
        inside = columns + 256*rows + 2048*tile - 49152
        place_t1 = t1 + 192*chunk + inside
        left = tl.load(place_t1, mask=inside < 192, other=0.0).to(tl.float32)
        right = tl.load(place_t1 + 128, mask=inside + 128 < 192, other=0.0).to(tl.float32)
    parcel = wire + 50976*(chunk % 2) + 25488*(chunk // 2)
    kept = errors + 100384*(chunk % 2) + 50192*(chunk // 2)
    left, right, old_left, old_right = add_errors(kept, block, columns, used, left, right)
    back_left, back_right = write_blocks(parcel, block, columns, used, left, right)
    # Blocks that are not finite come back as NaN, and leave no errors.
    new_left = 0.8 * old_left + 0.2 * (left - back_left)
    new_left = tl.where(back_left == back_left, new_left, 0.0)
    new_right = 0.8 * old_right + 0.2 * (right - back_right)
    new_right = tl.where(back_right == back_right, new_right, 0.0)
    # All threads have read the old errors before one of them writes new ones.
    tl.debug_barrier()
    write_errors(kept, block, columns, used, new_left, new_right)
    if tile == 24:
        # Slots beyond the last block, as of a block of zeros.
        slot = 193 + tl.arange(0, 4)
        params = (parcel + 24704).to(tl.pointer_type(tl.float32)) + slot
        tl.store(params, tl.full([4], 1.1754943508222875e-38, tl.float32), mask=slot < 196)
    if tile == 24:
        # Slots beyond the last block, as of a block of zeros.
        slot = 193 + tl.arange(0, 4)
        params = (kept + 49408).to(tl.pointer_type(tl.float32)) + slot
        tl.store(params, tl.full([4], 1.1754943508222875e-38, tl.float32), mask=slot < 196)
