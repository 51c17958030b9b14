# mypy: disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton evaluates every annotation of a kernel, so only the constants have one.)
"""The kernels of `routing.py`, written in Triton. Only a launch imports this module. Triton compiles a kernel at its first one.

Tensors come first, then sizes. Constants in capitals with a type are known when a kernel is compiled. For other numbers of
tokens, no kernel is compiled anew.
"""

import triton
from triton import language as tl


@triton.jit
def _scores(x, inside, SIGMOID: tl.constexpr):
    """Return the log-sum-exp of each row, softmax, the scores that are compared, those of the balance, and sums of scores.

    `x` is −inf outside.
    """
    largest = tl.max(x, axis=1)
    base = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    exponential = tl.exp(x - base[:, None])
    total = tl.sum(exponential, axis=1)
    softmax = exponential / total[:, None]
    lse = base + tl.log(total)
    if SIGMOID:
        score = tl.where(inside, 1.0 / (1.0 + tl.exp(-x)), 0.0)
        sums = tl.sum(score, axis=1)
        balance = score / tl.maximum(sums, 1e-20)[:, None]
    else:
        score, balance, sums = softmax, softmax, total
    return lse, softmax, score, balance, sums


@triton.jit(do_not_specialize=["S"])
def gate(
    logits, bias, expert, weight, partial_score, partial_count, partial_z, S, E, SCALE,
    K: tl.constexpr, SIGMOID: tl.constexpr, LAST: tl.constexpr, NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    b, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    s = block * TOKENS + tl.arange(0, TOKENS)
    t = b * S + s
    e, k = tl.arange(0, EXPERTS)[None, :], tl.arange(0, SLOTS)[None, :]
    inside = (s < S)[:, None] & (e < E)
    x = tl.load(logits + t[:, None] * E + e, mask=inside, other=float("-inf"))
    x = tl.where((s < S)[:, None], x, 0.0)  # no token has finite sums, which are left out below
    lse, _, score, balance, _ = _scores(x, inside, SIGMOID)
    value = x if LAST else score
    ranked = value if LAST else value + tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)
    # NaN is the largest, as in torch's top-k. What is taken, and what is no expert, is below all else.
    ranked = tl.where(ranked != ranked, float("inf"), tl.maximum(ranked, -3.4e38))
    ranked = tl.where(e < E, ranked, float("-inf"))
    chosen, values = tl.zeros((TOKENS, SLOTS), tl.int32), tl.full((TOKENS, SLOTS), float("-inf"), tl.float32)
    taken = tl.zeros((TOKENS, EXPERTS), tl.int32)
    for i in tl.static_range(K):
        best = tl.argmax(ranked, axis=1, tie_break_left=True)[:, None].to(tl.int32)
        hit = e == best
        chosen = tl.where(k == i, best, chosen)
        values = tl.where(k == i, tl.sum(tl.where(hit, value, 0.0), axis=1)[:, None], values)
        taken += hit.to(tl.int32)
        ranked = tl.where(hit, float("-inf"), ranked)
    if LAST:
        values = tl.exp(values - tl.max(values, axis=1)[:, None])
        values = values / tl.sum(values, axis=1)[:, None]
    else:
        values = tl.where(k < K, values, 0.0)
        if NORMALIZE:
            values = values / tl.maximum(tl.sum(values, axis=1), 1e-20)[:, None]
    of_token = (s < S)[:, None] & (k < K)
    at = t[:, None] * K + k
    tl.store(expert + at, chosen.to(tl.int64), mask=of_token)
    tl.store(weight + at, values * SCALE, mask=of_token)
    part = b * tl.num_programs(0) + block
    column = tl.arange(0, EXPERTS)
    tl.store(partial_score + part * E + column, tl.sum(tl.where(inside, balance, 0.0), axis=0), mask=column < E)
    tl.store(partial_count + part * E + column, tl.sum(tl.where(inside, taken, 0), axis=0), mask=column < E)
    tl.store(partial_z + part, tl.sum(tl.where(s < S, lse * lse, 0.0), axis=0))


@triton.jit(do_not_specialize=["PARTS", "ALL"])
def gate_sums(
    partial_score, partial_count, partial_z, score, count, z, PARTS, E, ALL, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    scores, counts = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.int32)
    first = 0
    while first < PARTS:
        p = first + tl.arange(0, ROWS)
        at = (b * PARTS + p)[:, None] * E + e[None, :]
        inside = (p < PARTS)[:, None] & (e < E)[None, :]
        scores += tl.sum(tl.load(partial_score + at, mask=inside, other=0.0), axis=0)
        counts += tl.sum(tl.load(partial_count + at, mask=inside, other=0), axis=0)
        first += ROWS
    tl.store(score + b * E + e, scores, mask=e < E)
    tl.store(count + b * E + e, counts.to(tl.int64), mask=e < E)
    if (tl.program_id(0) == 0) & (b == 0):
        total = tl.zeros((ROWS * COLUMNS,), tl.float32)
        begin = 0
        while begin < ALL:
            p = begin + tl.arange(0, ROWS * COLUMNS)
            total += tl.load(partial_z + p, mask=p < ALL, other=0.0)
            begin += ROWS * COLUMNS
        tl.store(z, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["S"])
def gate_backward(
    logits, expert, dweight, dscore, dz, dlogits, S, E, SCALE,
    K: tl.constexpr, SIGMOID: tl.constexpr, LAST: tl.constexpr, NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    s = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    t = b * S + s
    e, k = tl.arange(0, EXPERTS)[None, :], tl.arange(0, SLOTS)[None, :]
    inside, of_token = (s < S)[:, None] & (e < E), (s < S)[:, None] & (k < K)
    x = tl.load(logits + t[:, None] * E + e, mask=inside, other=float("-inf"))
    x = tl.where((s < S)[:, None], x, 0.0)
    lse, softmax, score, balance, sums = _scores(x, inside, SIGMOID)
    value = x if LAST else score
    at = t[:, None] * K + k
    chosen = tl.load(expert + at, mask=of_token, other=-1).to(tl.int32)
    slope = tl.load(dweight + at, mask=of_token, other=0.0).to(tl.float32) * SCALE
    values = tl.full((TOKENS, SLOTS), float("-inf"), tl.float32)
    for i in tl.static_range(K):
        here = tl.sum(tl.where(k == i, chosen, 0), axis=1)[:, None]
        values = tl.where(k == i, tl.sum(tl.where(e == here, value, 0.0), axis=1)[:, None], values)
    if LAST:
        weights = tl.exp(values - tl.max(values, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
        slope = weights * (slope - tl.sum(slope * weights, axis=1)[:, None])
    elif NORMALIZE:
        weights = tl.where(k < K, values, 0.0)
        total = tl.sum(weights, axis=1)
        share = tl.maximum(total, 1e-20)
        # A sum that is clamped has no gradient. The slopes of slots without an expert are cut off below.
        mean = tl.where(total >= 1e-20, tl.sum(slope * weights, axis=1) / share, 0.0)
        slope = (slope - mean[:, None]) / share[:, None]
    spread = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for i in tl.static_range(K):
        here = tl.sum(tl.where(k == i, chosen, 0), axis=1)[:, None]
        spread += tl.where(e == here, tl.sum(tl.where(k == i, slope, 0.0), axis=1)[:, None], 0.0)
    even = tl.load(dscore + b * E + e, mask=e < E, other=0.0).to(tl.float32)
    gradient = softmax * (2.0 * lse * tl.load(dz).to(tl.float32))[:, None]
    if SIGMOID:
        mean = tl.where(sums >= 1e-20, tl.sum(tl.where(inside, even * balance, 0.0), axis=1), 0.0)[:, None]
        of_score = (even - mean) / tl.maximum(sums, 1e-20)[:, None]
        if LAST:
            gradient += spread
        else:
            of_score += spread
        gradient += of_score * score * (1.0 - score)
    else:
        of_score = even if LAST else even + spread
        gradient += softmax * (of_score - tl.sum(tl.where(inside, of_score * softmax, 0.0), axis=1)[:, None])
        if LAST:
            gradient += spread
    tl.store(dlogits + t[:, None] * E + e, gradient, mask=inside)


@triton.jit(do_not_specialize=["M"])
def count_by_expert(key, keep, counts, M, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    m = block * ROWS + tl.arange(0, ROWS)
    own = tl.load(key + m, mask=m < M, other=-1).to(tl.int32)
    if keep is not None:
        own = tl.where(tl.load(keep + m, mask=m < M, other=0) != 0, own, -1)
    for first in range(0, E, COLUMNS):
        e = first + tl.arange(0, COLUMNS)
        found = tl.sum((own[:, None] == e[None, :]).to(tl.int32), axis=0)
        tl.store(counts + block * E + e, found, mask=e < E)


@triton.jit(do_not_specialize=["BLOCKS"])
def scan_by_expert(counts, totals, BLOCKS, E, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace the counts of blocks by the sums of earlier ones, and return all sums."""
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    first = 0
    while first < BLOCKS:
        p = (first + tl.arange(0, ROWS)).to(tl.int64)
        at, inside = p[:, None] * E + e[None, :], (p < BLOCKS)[:, None] & (e < E)[None, :]
        found = tl.load(counts + at, mask=inside, other=0)
        tl.store(counts + at, before[None, :] + tl.cumsum(found, axis=0) - found, mask=inside)
        before += tl.sum(found, axis=0)
        first += ROWS
    tl.store(totals + e, before.to(tl.int64), mask=e < E)


@triton.jit(do_not_specialize=["M", "CAPACITY"])
def place_by_expert(
    key, keep, counts, totals, token, position, M, CAPACITY, E: tl.constexpr,
    K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    m = block * ROWS + tl.arange(0, ROWS)
    own = tl.load(key + m, mask=m < M, other=-1).to(tl.int32)
    if keep is not None:
        own = tl.where(tl.load(keep + m, mask=m < M, other=0) != 0, own, -1)
    kept = own >= 0
    row = tl.arange(0, ROWS)
    earlier = (own[:, None] == own[None, :]) & (row[None, :] < row[:, None])
    place = tl.sum(earlier.to(tl.int32), axis=1) + tl.load(counts + block * E + own, mask=kept, other=0)
    start = own.to(tl.int64) * CAPACITY
    if not PADDED:
        start = tl.zeros((ROWS,), tl.int64)
        for first in range(0, E, COLUMNS):
            e = first + tl.arange(0, COLUMNS)
            total = tl.load(totals + e, mask=e < E, other=0)
            start += tl.sum(tl.where(e[None, :] < own[:, None], total[None, :], 0), axis=1)
    place = tl.where(kept, start + place, -1)
    tl.store(position + m, place, mask=m < M)
    tl.store(token + place, m // K, mask=kept)
