"""Which experts are computed at once: in grouped products, which read on the device where the rows of each expert end."""

from __future__ import annotations

SUMMING_PRODUCT = 1 << 23
"""From this many weights per expert on, a GPU sums gradients of weights faster in one product after another that adds to the sum,
than in a grouped product and a sum (H100: 8 experts of 4096 × 28672, 4096 rows, 4.1 and 5.7 ms; 128 of 2048 × 1536, 16384 rows,
3.6 and 2.0 ms). The host must know their rows."""

CAPABILITIES = (9, 10)
"""Major compute capabilities of the GPUs that torch has a kernel of grouped products for. On others, torch has the host read
where rows end, and computes one product after another."""

SMALL_PRODUCT = 1 << 21
"""Up to this many multiply-adds per expert, a CPU takes longer to start a product than to compute it (one core of Zen 5, 64
experts of 64 × 128 with 4 rows each: 2.7 ms grouped, 4.8 ms one by one)."""

_ALIGNED = 8  # numbers of bfloat16 that have 16 bytes, of which rows of a grouped product have a multiple


def in_groups(experts: int, hidden: int, inner: int) -> bool:
    """Whether a GPU computes a rank's experts in grouped products of bfloat16. For one expert, plain products are faster."""
    return experts > 1 and hidden % _ALIGNED == 0 and inner % _ALIGNED == 0


def summed_in_groups(weights: int) -> bool:
    """Whether a GPU sums the gradients of experts' weights in grouped products. Each expert has so many of them."""
    return weights < SUMMING_PRODUCT


def one_by_one(rows: float, hidden: float, inner: float, experts: float) -> bool:
    """Whether a CPU computes a rank's experts one after another, which is fastest if products are large."""
    return experts <= 1 or rows * hidden * inner >= SMALL_PRODUCT * experts or not rows
