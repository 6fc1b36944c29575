"""Tile shapes of attention over e4m3 pages with queries of two bytes, by shared-memory class; as `tile_tables`.

The fresh rows are tiles of two-byte rows all the same, and the larger ones: they decide what fits. A tile of pages has half their
bytes, so decode has a stage more where two of them are too few to keep 36 KB in flight an SM.
"""

# fmt: off
# Prefill: head_dim -> (block_m, block_n, num_warps, num_stages, value_parts[, fresh_tma[, programs_per_sm]]).
PREFILL = {
    "hopper": {
        32: (64, 64, 4, 3, 1, True),
        64: (128, 128, 8, 3, 1, True),
        128: (128, 64, 8, 3, 1, True),
        256: (128, 32, 8, 3, 1, True),
        512: (128, 32, 8, 2, 2, True),
    },
    "blackwell": {
        32: (64, 64, 4, 3, 1),
        64: (128, 64, 8, 3, 1),
        128: (128, 64, 8, 3, 1),
        256: (128, 32, 8, 3, 1),
        512: (128, 32, 8, 2, 2),
    },
    "medium": {
        32: (64, 64, 4, 3, 1),
        64: (128, 64, 8, 3, 1),
        128: (64, 64, 8, 3, 1),
        256: (64, 32, 8, 2, 1),
        512: (32, 32, 8, 2, 1),
    },
    "small": {
        32: (64, 64, 4, 3, 1),
        64: (128, 32, 8, 3, 1),
        128: (64, 32, 8, 3, 1),
        256: (64, 32, 8, 2, 1),
        512: (32, 16, 8, 2, 1),
    },
}

# Decode: head_dim -> rows -> (block_n, num_warps, num_stages). With 99 KiB no tile of 64 rows fits at 512.
DECODE = {
    "hopper": {
        32: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 4)},
        64: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 4)},
        128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        256: {16: (32, 4, 3), 32: (32, 4, 3), 64: (64, 8, 3)},
        512: {16: (16, 4, 3), 32: (32, 8, 3), 64: (16, 8, 4)},
    },
    "blackwell": {
        32: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 4)},
        64: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 4)},
        128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        256: {16: (32, 4, 3), 32: (32, 4, 3), 64: (32, 8, 4)},
        512: {16: (16, 4, 3), 32: (32, 8, 3), 64: (16, 8, 4)},
    },
    "medium": {
        32: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 4)},
        64: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 4)},
        128: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        256: {16: (32, 4, 3), 32: (32, 4, 3), 64: (32, 8, 3)},
        512: {16: (16, 4, 3), 32: (16, 8, 3), 64: (16, 8, 3)},
    },
    "small": {
        32: {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 4)},
        64: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)},
        128: {16: (32, 4, 3), 32: (32, 4, 3), 64: (32, 4, 3)},
        256: {16: (32, 4, 2), 32: (32, 4, 2), 64: (32, 8, 2)},
        512: {16: (16, 4, 2), 32: (16, 8, 2)},
    },
}

# Head_dims at which codes become fp16 in a tile of more than 32 rows as well, by phase: where each row has a scale, and where one serves all. At the
# others that takes more instructions than it saves, or registers that there are not.
HALF_DIMS = {
    "hopper": {"prefill": ((128,), (32, 64, 128)), "decode": ((64, 128), (32, 64, 128, 256))},
    "blackwell": {"prefill": ((128,), (32, 64, 128, 256)), "decode": ((128, 256), (32, 64, 128, 256))},
    "medium": {"prefill": ((32, 64, 128), (32, 64, 128, 256)), "decode": ((32, 64, 256), (32, 64, 128, 256, 512))},
    "small": {"prefill": ((32, 64, 128, 256), (32, 64, 128, 256)), "decode": ((32, 64, 128, 256), (32, 64, 128, 256))},
}
