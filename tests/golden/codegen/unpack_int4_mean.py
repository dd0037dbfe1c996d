"""Unpack: parcels become tensors, the mean of 3 sources, in one launch.

Written by zerofx for one bucket; do not edit.

    codec    int4x256
    reads    uint8[3, 1, 25344]
    writes   1 tensors, see below
    parcel   192 blocks of 128 B, then 192 scales
    bytes    174336 in all
    launch   12 programs of 4 warps, 16 blocks each

        tensor           dtype     elements  chunk  blocks  tiles
    t0  layers.0.weight  bfloat16  49152     49152  0–191   0–11
"""

import triton
import triton.language as tl


@triton.jit
def read_blocks(parcel, block, columns, used):
    """Decoded blocks of a parcel."""
    code = tl.load(parcel + block * 128 + columns, mask=used, other=0)
    params = (parcel + 24576).to(tl.pointer_type(tl.float32)) + block
    scale = tl.load(params, mask=used, other=0.0)
    both = code.to(tl.int32)
    left = ((both << 28) >> 28).to(tl.float32) * scale
    right = ((both << 24) >> 28).to(tl.float32) * scale
    return left, right


@triton.jit
def mean_blocks(parcel, block, columns, used):
    """Mean over the parcels of 3 sources, added in their order."""
    left, right = read_blocks(parcel, block, columns, used)
    for source in tl.static_range(1, 3):
        more_left, more_right = read_blocks(parcel + source * 25344, block, columns, used)
        left += more_left
        right += more_right
    left = tl.div_rn(left, 3.0)
    right = tl.div_rn(right, 3.0)
    return left, right


@triton.jit
def unpack(wires, t0):
    program = tl.program_id(0)
    tile = program
    rows = tl.arange(0, 16)[:, None]
    columns = tl.arange(0, 128)[None, :]
    # layers.0.weight
    block = rows + 16*tile
    used = block < 192
    parcel = wires
    left, right = mean_blocks(parcel, block, columns, used)
    # layers.0.weight
    inside = columns + 256*rows + 4096*tile
    place_t0 = t0 + inside
    tl.store(place_t0, left.to(tl.bfloat16))
    tl.store(place_t0 + 128, right.to(tl.bfloat16))
