"""Unpack: parcels become tensors, in one launch.

Written by zerofx for one bucket; do not edit.

    codec    int8x256
    reads    uint8[1, 4, 50448]
    writes   3 tensors, see below
    parcel   194 blocks of 256 B, then 196 scales
    bytes    993298 in all
    launch   56 programs of 4 warps, 16 blocks each

        tensor           dtype     elements  chunk  blocks  tiles
    t0  layers.0.weight  float32   196608    49152  0–191   0–11
    t1  layers.0.bias    float32   768       192    192     12
    t2  head.weight      bfloat16  1001      251    193     13
"""

import triton
import triton.language as tl


@triton.jit
def read_blocks(parcel, block, columns, used):
    """Decoded blocks of a parcel."""
    code = tl.load(parcel + block * 256 + columns, mask=used, other=0)
    params = (parcel + 49664).to(tl.pointer_type(tl.float32)) + block
    scale = tl.load(params, mask=used, other=0.0)
    x = code.to(tl.int8, bitcast=True).to(tl.float32) * scale
    return x


@triton.jit
def unpack(wires, t0, t1, t2):
    program = tl.program_id(0)
    chunk = program // 14
    tile = program % 14
    rows = tl.arange(0, 16)[:, None]
    columns = tl.arange(0, 256)[None, :]
    if tile < 12:  # layers.0.weight
        block = rows + 16*tile
        used = block < 192
    elif tile < 13:  # layers.0.bias
        block = rows + 16*tile
        used = block < 193
    else:  # head.weight
        block = rows + 16*tile - 15
        used = block < 194
    parcel = wires + 50448*chunk
    x = read_blocks(parcel, block, columns, used)
    if tile < 12:  # layers.0.weight
        inside = columns + 256*rows + 4096*tile
        place_t0 = t0 + 49152*chunk + inside
        tl.store(place_t0, x)
    elif tile < 13:  # layers.0.bias
        inside = columns + 256*rows + 4096*tile - 49152
        place_t1 = t1 + 192*chunk + inside
        tl.store(place_t1, x, mask=inside < 192)
    else:  # head.weight
        inside = columns + 256*rows + 4096*tile - 53248
        place_t2 = t2 + 251*chunk + inside
        limit = tl.minimum(1001 - 251*chunk, 251)
        tl.store(place_t2, x.to(tl.bfloat16), mask=inside < limit)
