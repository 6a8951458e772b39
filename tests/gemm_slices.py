"""Which slices of k the prefill engine of Hopper takes (plan_gemm of csrc/gemm_wgmma_plan.h), and calls that are two
launches to it (csrc/gemm_wgmma_choice.h)."""

from nf4linear.bench.linear import TUNE_GEMM_SLICES
from nf4linear.formats import FourBitSpec

# Sums of slices take the room of x (plan_gemm): of fewer stages, fewer slices.
MOST_SLICES = {320: 2, 344: 3}
FOUR_BY_TWO = TUNE_GEMM_SLICES["2+2"]  # in place of a number of slices: four, by two clusters

# (spec, tokens, slices of the launch in front, where 1 is none) on an H200.
TWO_LAUNCHES = (
    (FourBitSpec("nf4", 4120, 4096), 1350, 4),
    (FourBitSpec("nf4", 6168, 4096, blocksize=256), 1000, 2),
    (FourBitSpec("nf4", 5120, 4096), 1600, 1),
    (FourBitSpec("nf4", 6144, 8192), 1900, FOUR_BY_TWO),
    (FourBitSpec("fp4", 4125, 4096, double_quant=False), 1350, 4),  # rows of y that start anywhere
)


def can_be_cut(width: int, consumers: int, pairs: int, k_tiles: int, slices: int, sms: int) -> bool:
    """Of a shape (tokens, warpgroups) and a call of so many pairs of output tiles, on so many SMs."""
    if slices == FOUR_BY_TWO:
        return width in (128, 256) and consumers == 2 and pairs <= min(16, sms // 8) and k_tiles >= 16
    if slices > MOST_SLICES.get(width, slices):
        return False
    room = (sms * 7 // 8 if slices > 2 else sms) // max(2, slices)
    sliced = 0 if slices == 1 or room == 0 else pairs % room if slices == 2 else pairs
    return room > 0 and (slices == 1 or (0 < 2 * sliced <= room and k_tiles >= 4 * slices))
