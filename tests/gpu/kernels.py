"""Measures single kernels, for the rules by which the engine chooses among them. Times are medians in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from foldray.kernels.attention import attend, attend_backward, merge
from foldray.kernels.autograd import add_product, wide_product
from tests.gpu.report import Report, milliseconds

_ATTENTION = {"heads": 32, "kv_heads": 8, "width": 128}
_EXPERTS = [(4096, 28672, 8, 16384), (4096, 28672, 8, 4096), (4096, 28672, 1, 16384), (2048, 1536, 128, 65536),
            (2048, 1536, 128, 16384), (2048, 1536, 16, 65536)]  # fmt: skip
"""Hidden and width of the first product, number of experts, rows."""


def run(report: Report) -> None:
    for side in (4096, 8192, 16384):
        report.check("kernels", f"product of {side}³, TFLOP/s", lambda n=side: 2 * n**3 / 1e9 / _product(n))
    for length in (8192, 32768):
        report.check("kernels", f"attention of {length} tokens", lambda n=length: attention(n))
    for sizes in _EXPERTS:
        report.check("kernels", "experts {}×{}, {} experts, {} rows".format(*sizes), lambda s=sizes: experts(*s))
    for hidden, count in ((4096, 8), (2048, 128), (7168, 256)):
        report.check("kernels", f"router {hidden}×{count}", lambda h=hidden, e=count: router(h, e))
    report.check("kernels", "copies, GB/s", copies)


def attention(length: int) -> dict[str, float]:
    """Measure forward and backward of whole sequences by backend, and of slices as the engine computes them."""
    N, G, D = _ATTENTION["heads"], _ATTENTION["kv_heads"], _ATTENTION["width"]
    q, dout = (_random(1, length, N, D).transpose(1, 2) for _ in range(2))
    k, v = (_random(1, length, G, D).transpose(1, 2) for _ in range(2))
    leaves, found = [x.detach().requires_grad_() for x in (q, k, v)], {}
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):

        def whole(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).backward(dout)

        found[f"{name}, whole"] = milliseconds(whole)
    for degree in (2, 4, 8):
        found[f"{degree} slices"] = milliseconds(lambda degree=degree: _sliced(q, k, v, dout, length // degree))
    return found


def _sliced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, size: int) -> None:
    for start in range(0, q.shape[2], size):
        own, before = slice(start, start + size), slice(0, start)
        out, lse = attend(q[:, :, own], k[:, :, own], v[:, :, own], "causal")
        if start:
            out, lse = merge(out, lse, *attend(q[:, :, own], k[:, :, before], v[:, :, before]))
        out = out.to(q.dtype)
        attend_backward(dout[:, :, own], q[:, :, own], k[:, :, own], v[:, :, own], out, lse, "causal")
        if start:
            attend_backward(dout[:, :, own], q[:, :, own], k[:, :, before], v[:, :, before], out, lse)


def experts(hidden: int, width: int, count: int, rows: int) -> dict[str, float]:
    """Measure one product and the gradient of its weights: all experts at once, and one by one."""
    x, g, w = _random(rows, hidden), _random(rows, width), _random(count, hidden, width)
    counts, total = [rows // count] * count, torch.zeros(count, hidden, width, device="cuda")
    ends = torch.arange(1, count + 1, device="cuda", dtype=torch.int32) * (rows // count)

    def one_by_one() -> None:
        for sum_IO, a_nI, b_nO in zip(total, x.split(counts), g.split(counts), strict=True):
            add_product(sum_IO, a_nI.t(), b_nO)

    found = {
        "grouped": milliseconds(lambda: F.grouped_mm(x, w, offs=ends)),
        "one by one": milliseconds(lambda: [a @ b for a, b in zip(x.split(counts), w, strict=True)]),
        "gradient, grouped, and sum": milliseconds(lambda: total.add_(F.grouped_mm(x.t(), g, offs=ends))),
        "gradient, grouped": milliseconds(lambda: F.grouped_mm(x.t(), g, offs=ends)),
        "gradient, one by one into the sum": milliseconds(one_by_one),
    }
    total.zero_()
    one_by_one()
    exact = x[: counts[0]].double().t() @ g[: counts[0]].double()
    off = float((total[0].double() - exact).norm() / exact.norm())
    assert off < 1e-5, f"the product into the sum differs by {off:.1e}"
    return {**found, "TFLOP/s grouped": 2 * rows * hidden * width / 1e9 / found["grouped"]}


def router(hidden: int, count: int) -> dict[str, float]:
    """Measure a router's product, forward and backward, with its error against float64; the same in float32."""
    x, w, g = _random(8192, hidden).requires_grad_(), (_random(hidden, count) * 0.02).detach().requires_grad_(), None
    g = torch.randn(8192, count, device="cuda")

    def wide() -> list[torch.Tensor]:
        y = wide_product(x, w)
        return [y.detach(), *torch.autograd.grad(y, [x, w], g)]

    def plain() -> list[torch.Tensor]:
        y = x.float() @ w.float()
        return [y.detach(), *torch.autograd.grad(y, [x, w], g)]

    a, b = x.detach().double(), w.detach().double()
    exact = [a @ b, g.double() @ b.t(), a.t() @ g.double()]
    found: dict[str, float] = {"wide": milliseconds(wide), "float32": milliseconds(plain)}
    for name, results in (("wide", wide()), ("float32", plain())):
        errors = [float((one.double() - other).norm() / other.norm()) for one, other in zip(results, exact, strict=True)]
        found |= {f"{name} {what} error": error for what, error in zip(("y", "dx", "dw"), errors, strict=True)}
    return found


def copies() -> dict[str, float]:
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y, pinned = torch.empty_like(x), torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    part = x[: 1 << 28]
    return {
        "on the GPU, read and written": 2 * (1 << 30) / 1e6 / milliseconds(lambda: y.copy_(x)),
        "to the host": (1 << 28) / 1e6 / milliseconds(lambda: pinned.copy_(part, non_blocking=True)),
        "from the host": (1 << 28) / 1e6 / milliseconds(lambda: part.copy_(pinned, non_blocking=True)),
    }


def _product(side: int) -> float:
    a, b = _random(side, side), _random(side, side)
    return milliseconds(lambda: a @ b)


def _random(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, **options)
