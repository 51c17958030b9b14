# mypy: disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton evaluates every annotation of a kernel, so only the constants have one.)
"""The kernels of `fused.py`, written in Triton. Only a launch imports this module. Triton compiles a kernel at its first one.

Tensors and their strides come first, then sizes. Constants in capitals are known when a kernel is compiled.
"""

import triton
from triton import language as tl


@triton.jit
def gated_silu(up, h, up_stride, F, COLUMNS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)  # the product with a stride may need 64 bits
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = f < F
    gate = tl.load(up + n * up_stride + f, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up + n * up_stride + F + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + n * F + f, gate * tl.sigmoid(gate) * value, mask=inside)


@triton.jit
def gated_silu_backward(dh, up, h, dup, dh_stride, up_stride, F, COLUMNS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = f < F
    gate = tl.load(up + n * up_stride + f, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up + n * up_stride + F + f, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(dh + n * dh_stride + f, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(h + n * F + f, silu * value, mask=inside)  # `h` may be `dh`: every thread has read what it overwrites
    tl.store(dup + n * 2 * F + f, slope * value * sigmoid * (1.0 + gate * (1.0 - sigmoid)), mask=inside)
    tl.store(dup + n * 2 * F + F + f, slope * silu, mask=inside)


@triton.jit
def sum_rows(rows, position, weight, out, rows_stride, H, K: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(K):
        n = tl.load(position + t * K + k).to(tl.int64)
        row = tl.load(rows + n * rows_stride + c, mask=(c < H) & (n >= 0), other=0.0).to(tl.float32)
        if weight is not None:
            row *= tl.load(weight + t * K + k, mask=n >= 0, other=0.0).to(tl.float32)
        total += row
    tl.store(out + t * H + c, total, mask=c < H)


@triton.jit
def combine_backward(
    dout, y, position, weight, dy, dweight, dout_stride, y_stride, H: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, SLOTS)
    n = tl.load(position + t * K + k, mask=k < K, other=-1).to(tl.int64)[:, None]
    w = tl.load(weight + t * K + k, mask=k < K, other=0.0).to(tl.float32)[:, None]
    dots = tl.zeros((SLOTS, COLUMNS), tl.float32)
    for start in range(0, H, COLUMNS):
        c = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (n >= 0) & (c < H)
        slope = tl.load(dout + t * dout_stride + c, mask=c < H, other=0.0).to(tl.float32)
        row = tl.load(y + n * y_stride + c, mask=inside, other=0.0).to(tl.float32)
        dots += tl.where(inside, slope * row, 0.0)  # an infinite slope times a row that is not there must stay out
        tl.store(dy + n * H + c, w * slope, mask=inside)
    tl.store(dweight + t * K + k, tl.sum(dots, axis=1), mask=k < K)


@triton.jit
def merge(
    a, lse_a, b, lse_b, out, lse, a_batch, a_head, a_row, b_batch, b_head, b_row, N, D,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    s, batch, rows = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(0)
    n = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    d = tl.arange(0, COLUMNS)[None, :]
    at = (batch * N + n) * rows + s
    first = tl.load(lse_a + at, mask=n < N, other=0.0)
    second = tl.load(lse_b + at, mask=n < N, other=0.0)
    largest = tl.maximum(first, second)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # where a query sees no key
    first, second = tl.exp(first - base), tl.exp(second - base)
    total = first + second
    tl.store(lse + at, base + tl.log(total), mask=n < N)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    inside = (n[:, None] < N) & (d < D)
    x = tl.load(a + batch * a_batch + n[:, None] * a_head + s * a_row + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(b + batch * b_batch + n[:, None] * b_head + s * b_row + d, mask=inside, other=0.0).to(tl.float32)
    merged = x * (first * share)[:, None] + y * (second * share)[:, None]
    tl.store(out + ((batch * rows + s) * N + n[:, None]) * D + d, merged, mask=inside)


@triton.jit
def rotate(
    x, cos, sin, out, b_stride, s_stride, n_stride, N, HALF,
    BACK: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    s, b = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    n = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, COLUMNS)[None, :]
    inside = (n < N) & (d < HALF)
    x_at = x + b * b_stride + s * s_stride + n.to(tl.int64) * n_stride + d
    out_at = out + ((b * tl.num_programs(0) + s) * N + n) * 2 * HALF + d
    first = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_at + HALF, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + s * HALF + d, mask=d < HALF, other=0.0)
    sine = tl.load(sin + s * HALF + d, mask=d < HALF, other=0.0)
    if BACK:
        sine = -sine
    tl.store(out_at, first * cosine - second * sine, mask=inside)
    tl.store(out_at + HALF, second * cosine + first * sine, mask=inside)


@triton.jit
def add_groups(total, gradient, ends, NUMBERS, COLUMNS: tl.constexpr):
    e = tl.program_id(1).to(tl.int64)
    if tl.load(ends + e) > tl.load(ends + e - 1, mask=e > 0, other=0):  # else the gradient is any numbers
        c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        at = e * NUMBERS + c
        more = tl.load(gradient + at, mask=c < NUMBERS, other=0.0).to(tl.float32)
        before = tl.load(total + at, mask=c < NUMBERS, other=0.0).to(tl.float32)
        tl.store(total + at, before + more, mask=c < NUMBERS)


@triton.jit
def halves(x, out, COLUMNS_OF_X, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < COLUMNS_OF_X
    wide = tl.load(x + t * COLUMNS_OF_X + c, mask=inside, other=0.0)
    high = wide.to(tl.bfloat16)
    at = out + t * 2 * COLUMNS_OF_X + c
    tl.store(at, high, mask=inside)
    tl.store(at + COLUMNS_OF_X, (wide - high.to(tl.float32)).to(tl.bfloat16), mask=inside)


@triton.jit
def split_rotate(
    x, bias, cos, sin, q, k, v, b_stride, s_stride, SCALE,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    s, b, length = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(0)
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, COLUMNS)[None, :]
    inside = (h < N + 2 * G) & (d < D)
    at = b * b_stride + s * s_stride + h * D
    # The other column of a pair, and the angle of both. Columns behind the pairs, and values, stay as they are.
    turns = (h < N + G) & (d < 2 * HALF)
    other, angle = tl.where(d < HALF, d + HALF, d - HALF), s * HALF + tl.where(d < HALF, d, d - HALF)
    own = tl.load(x + at + d, mask=inside, other=0.0).to(tl.float32)
    pair = tl.load(x + at + other, mask=inside & turns, other=0.0).to(tl.float32)
    if bias is not None:
        own = (own + tl.load(bias + h * D + d, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
        more = tl.load(bias + h * D + other, mask=inside & turns, other=0.0).to(tl.float32)
        pair = (pair + more).to(x.dtype.element_ty).to(tl.float32)
    cosine = tl.load(cos + angle, mask=inside & turns, other=1.0)
    sine = tl.load(sin + angle, mask=inside & turns, other=0.0)
    turned = own * cosine + tl.where(d < HALF, -pair, pair) * sine
    turned = tl.where(h < N, turned * SCALE, turned)
    row = b * length + s
    tl.store(q + (row * N + h) * D + d, turned, mask=inside & (h < N))
    tl.store(k + (row * G + h - N) * D + d, turned, mask=inside & (h >= N) & (h < N + G))
    tl.store(v + (row * G + h - N - G) * D + d, turned, mask=inside & (h >= N + G))


@triton.jit
def split_rotate_backward(
    dq, dk, dv, cos, sin, dx, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, SCALE,
    N: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    s, b, length = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(0)
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, COLUMNS)[None, :]
    inside = (h < N + 2 * G) & (d < D)
    of_q, of_k, of_v = inside & (h < N), inside & (h >= N) & (h < N + G), inside & (h >= N + G)
    turns = (h < N + G) & (d < 2 * HALF)
    other, angle = tl.where(d < HALF, d + HALF, d - HALF), s * HALF + tl.where(d < HALF, d, d - HALF)
    q_at = dq + b * q_batch + s * q_row + h.to(tl.int64) * q_head
    k_at = dk + b * k_batch + s * k_row + (h - N).to(tl.int64) * k_head
    v_at = dv + b * v_batch + s * v_row + (h - N - G).to(tl.int64) * v_head
    # At most one of the three is no zero.
    own = tl.load(q_at + d, mask=of_q, other=0.0).to(tl.float32) + tl.load(k_at + d, mask=of_k, other=0.0).to(tl.float32)
    own += tl.load(v_at + d, mask=of_v, other=0.0).to(tl.float32)
    pair = tl.load(q_at + other, mask=of_q & turns, other=0.0).to(tl.float32)
    pair += tl.load(k_at + other, mask=of_k & turns, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=inside & turns, other=1.0)
    sine = tl.load(sin + angle, mask=inside & turns, other=0.0)
    turned = own * cosine + tl.where(d < HALF, pair, -pair) * sine
    turned = tl.where(h < N, turned * SCALE, turned)
    tl.store(dx + ((b * length + s) * (N + 2 * G) + h) * D + d, turned, mask=inside)


@triton.jit(do_not_specialize=["ROWS"])
def rms_norm_backward(dy, x, weight, rstd, beside, dx, partial, ROWS, H, COLUMNS: tl.constexpr):
    """Each program has every so many rows, and the sum of their gradients of the weight."""
    c = tl.arange(0, COLUMNS)
    inside = c < H
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    row = tl.program_id(0)
    while row < ROWS:
        at = row.to(tl.int64) * H + c
        scale = tl.load(rstd + row).to(tl.float32)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        slope = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        total += slope * normed
        slope *= w
        gradient = scale * (slope - normed * (tl.sum(slope * normed, axis=0) / H))
        gradient += tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, gradient, mask=inside)
        row += tl.num_programs(0)
    tl.store(partial + tl.program_id(0) * H + c, total, mask=inside)


@triton.jit(do_not_specialize=["ROWS"])
def sum_columns(partial, out, ROWS, H, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((TOGETHER, COLUMNS), tl.float32)
    row = 0
    while row < ROWS:
        r = row + tl.arange(0, TOGETHER)[:, None]
        total += tl.load(partial + r * H + c, mask=(r < ROWS) & (c < H), other=0.0)
        row += TOGETHER
    tl.store(out + c, tl.sum(total, axis=0)[None, :], mask=c < H)
