"""How far off codes are where a codec suits the numbers: on Gaussian ones."""

from __future__ import annotations

import math
from statistics import NormalDist

from zerofx.ir.parcels import Codec

LOST = 0.5
"""Of numbers that are not zero, the part that may come back as zero. Gaussian ones lose 17 % to
int4 and 1 % to int8; a block with one giant outlier loses all others."""

_FP8 = 0.026
_LARGEST = math.exp(-0.5772156649)
"""The expected largest of n numbers is about where this many of n would lie beyond (Euler)."""


def expected_error(codec: Codec) -> float:
    """Relative L2 error of one pass over Gaussian numbers.

    A block's largest magnitude, which grows with its size, is divided into equal steps, and errors
    are uniform within a step.
    """
    if codec.code == "fp8":
        return _FP8  # its steps grow with the numbers
    beyond = _LARGEST / codec.block
    if codec.symmetric:
        reach, steps = -NormalDist().inv_cdf(beyond / 2), 2 ** (codec.bits - 1) - 1
    else:
        reach, steps = -2 * NormalDist().inv_cdf(beyond), 2**codec.bits - 1
    variance = 1 / 6 if codec.rounding == "stochastic" else 1 / 12
    return reach / steps * math.sqrt(variance)


def most_error(codec: Codec) -> float:
    """Beyond it the codec does not suit the numbers: twice the error on Gaussian ones."""
    return 2 * expected_error(codec)
