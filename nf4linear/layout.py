"""Where each weight and scale lies in kernel order: pure integer maps, mirrored by csrc/layout.h and tested equal.

A 512-byte tile is 32 lanes x 16 bytes, the A fragments of mma.m16n8k16 (and of wgmma with A in registers): lane
l = 4 g + t owns rows g and g + 8. `reorder` does the same moves as whole-tensor permutes.

tile16x64 (4 bit), 16 rows x 64 inputs; bytes of a lane for k16 step s = 0..3, each byte two codes (high = even k):

    4s+0: row g,   k = 16s + 2t, +1        4s+2: row g,   k = 16s + 8 + 2t, +1
    4s+1: row g+8, same k                  4s+3: row g+8, same k as 4s+2

tile16x32 (8 bit), 16 rows x 32 inputs; bytes of a lane for step s = 0..1, k0 = 16s + 2t:

    8s+0: row g, k0    8s+1: row g, k0+1   8s+2: row g+8, k0   8s+3: row g+8, k0+1    8s+4..7: the same at k0 + 8
"""

from __future__ import annotations


def tile16x64_byte(row: int, k: int, n_k: int) -> int:
    """Byte of `qweight` that holds input `k` of `row`; `n_k` inputs a row. Even k is its high nibble."""
    h, g = divmod(row % 16, 8)
    s, rest = divmod(k % 64, 16)
    u, pair = divmod(rest, 8)
    lane = 4 * g + pair // 2
    return ((row // 16) * (n_k // 64) + k // 64) * 512 + lane * 16 + 4 * s + 2 * u + h


def tile16x32_byte(row: int, k: int, n_k: int) -> int:
    """Byte of an 8-bit `qweight` that holds input `k` of `row`; `n_k` inputs a row (padded to 32 in storage)."""
    h, g = divmod(row % 16, 8)
    s, rest = divmod(k % 32, 16)
    u, pair = divmod(rest, 8)
    t, e = divmod(pair, 2)
    return ((row // 16) * (-(-n_k // 32)) + k // 32) * 512 + (4 * g + t) * 16 + 8 * s + 4 * u + 2 * h + e


def absmax_q_byte(row: int, kb: int, n_kb: int) -> int:
    """Byte of `absmax_q` with the scale code of 64-input block `kb` of `row`; `n_kb` blocks a row."""
    h, g = divmod(row % 16, 8)
    return ((row // 16) * (-(-n_kb // 4)) + kb // 4) * 64 + 8 * g + 4 * h + kb % 4


def row_scale_index(row: int, kb: int, n_kb: int) -> int:
    """Element of float32 `absmax` or `group_scale` with the scale of block (or group) `kb` of `row`."""
    h, g = divmod(row % 16, 8)
    return ((row // 16) * n_kb + kb) * 16 + 2 * g + h


def nested_group(row: int, kb: int, n_kb: int, blocksize: int) -> int:
    """Element of `nested_absmax` that scales 64-input block `kb` of `row`; `n_kb` such blocks a row."""
    return (row * n_kb + kb) * 64 // blocksize // 256
