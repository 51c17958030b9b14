"""Compares kernels of our own with torch's path, at the sizes of real models, and measures both. Times are milliseconds.

`Machine` has all that a GPU does, so a test rehearses the script on Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch

from foldray.blueprint import ModelSpec, RopeSpec, RouterSpec
from foldray.kernels import autograd, fla, fused, routing
from foldray.kernels.delta import delta_rule, unit
from foldray.kernels.permutation import pad_by_expert, sort_by_expert
from foldray.model.layers import Norm
from foldray.model.rotary import rotate, rotation
from foldray.moe.router import TopKGate, scores
from tests.gpu.report import Report, milliseconds

TOKENS = 8192
GATES = [(8, 2), (64, 6), (128, 8), (256, 8), (512, 10)]
"""Numbers of experts, and of those of a token."""
RULES: dict[str, dict[str, Any]] = {
    "softmax last": {},
    "softmax, normalized": {"softmax": "before_topk", "normalize": True},
    "sigmoid, normalized": {"score": "sigmoid", "normalize": True},
}


class Machine(NamedTuple):
    """Where tensors lie, and what measures a call in milliseconds."""

    device: torch.device
    timed: Callable[[Callable[[], Any]], float] = milliseconds


def run(report: Report) -> None:
    machine = Machine(torch.device("cuda"))
    for experts, topk in GATES:
        for name, spec in RULES.items():
            what = f"gate, {experts} experts, {name}"
            report.check("fused", what, lambda s=spec, e=experts, k=topk: gate(machine, RouterSpec(**s), TOKENS, e, k))
        report.check("fused", f"sort, {experts} experts", lambda e=experts, k=topk: sort(machine, TOKENS, e, k))
        report.check("fused", f"halves, {experts} experts", lambda e=experts: halves(machine, TOKENS, e))
    for experts, hidden, width in ((128, 2048, 1536), (16, 2048, 1536), (64, 2048, 2816)):
        sizes = experts, hidden, width
        report.check("fused", "sums of {} experts, {} × {}".format(*sizes), lambda s=sizes: add_groups(machine, *s))
    for name, heads in HEADS.items():
        report.check("fused", f"split and rotation, {name}", lambda h=heads: split_rotate(machine, TOKENS, h))
    for hidden in (2048, 4096, 7168):
        report.check("fused", f"norm beside a residual stream, {hidden}", lambda h=hidden: norm(machine, TOKENS, h))
    if find_spec("fla") is None:
        report.say("no kernels of linear attention: pip install fla-core")
        return
    for kind in ("gated_delta", "kimi_delta"):
        report.check("fused", f"linear attention, {kind}", lambda k=kind: delta(machine, k, TOKENS, 16, 128))


HEADS = {"32 heads, 8 of keys, 128 wide": fused.Heads(32, 8, 128), "64 heads, 4 of keys, 64 wide": fused.Heads(64, 4, 64)}


def split_rotate(machine: Machine, tokens: int, heads: fused.Heads, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Compare queries, keys, values and gradients with float64, with a bias. Torch's path has our own rotation."""
    x = _random(machine, 1, tokens, heads.total * heads.width).to(dtype).requires_grad_()
    bias = _random(machine, heads.total * heads.width).to(dtype).requires_grad_()
    turn = rotation(torch.arange(tokens, device=machine.device), RopeSpec(heads.width, 1e6, False), dtype)
    sizes = heads.queries, heads.keys, heads.keys
    slopes = [_random(machine, 1, n, tokens, heads.width).to(dtype).transpose(1, 2) for n in sizes]

    def ours() -> list[torch.Tensor]:
        outs = fused.split_rotate(x, bias, turn.cos_SR, turn.sin_SR, heads)
        return [*outs, *torch.autograd.grad(outs, (x, bias), slopes)]

    def plain(x: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        parts = (x + bias).split([n * heads.width for n in sizes], -1)
        q, k, v = (part.unflatten(-1, (-1, heads.width)) for part in parts)
        outs = [rotate(q, turn), rotate(k, turn), v.contiguous()]
        return [*outs, *torch.autograd.grad(outs, (x, bias), [slope.to(x.dtype) for slope in slopes])]

    wide = plain(*(each.detach().double().requires_grad_() for each in (x, bias)))
    pairs = dict(zip(("q", "k", "v", "dx", "dbias"), zip(ours(), wide, strict=True), strict=True))
    return {**_near(pairs, 1e-2), "ours": machine.timed(ours), "torch": machine.timed(lambda: plain(x, bias))}


def delta(machine: Machine, kind: str, tokens: int, heads: int, width: int) -> dict[str, float]:
    """Compare the delta rule by flash-linear-attention, and its gradients, with plain products in float64."""
    q, k = (unit(_random(machine, 1, tokens, heads, width)) for _ in range(2))
    columns = width if kind == "kimi_delta" else 1
    decay, write = -_random(machine, 1, tokens, heads, columns).abs() / 10, _random(machine, 1, tokens, heads).sigmoid()
    v, state = _random(machine, 1, tokens, heads, width), _random(machine, 1, heads, width, width)
    given = [x.requires_grad_() for x in (q, k, v, decay, write, state)]
    slopes = _random(machine, *v.shape), _random(machine, *state.shape)

    def graded(outs: tuple[torch.Tensor, torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        gradients = torch.autograd.grad(outs, leaves, [slope.to(out) for slope, out in zip(slopes, outs, strict=True)])
        return [*(out.detach() for out in outs), *gradients]

    def ours() -> list[torch.Tensor]:
        return graded(fla.delta_rule(*given, torch.bfloat16), given)

    def plain(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return graded(delta_rule(*leaves), leaves)

    wide = plain([x.detach().double().requires_grad_() for x in given])
    names = ("out", "state", "dq", "dk", "dv", "ddecay", "dwrite", "dstate")
    pairs = dict(zip(names, zip(ours(), wide, strict=True), strict=True))
    return {**_near(pairs, 2e-2), "ours": machine.timed(ours), "torch": machine.timed(lambda: plain(given))}


def norm(machine: Machine, tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Compare a norm beside a residual stream with float64, and with torch's norm."""
    layer = Norm(ModelSpec(preset="tiny", hidden=hidden)).to(machine.device, dtype)
    with torch.no_grad():
        layer.weight.copy_(_random(machine, hidden))
    x, *slopes = (_random(machine, tokens, hidden).to(dtype) for _ in range(3))
    x.requires_grad_()

    def ours() -> list[torch.Tensor]:
        outs = fused.norm_beside(x, layer.weight, layer.eps)
        return [*outs, *torch.autograd.grad(outs, (x, layer.weight), slopes)]

    def plain(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        outs = torch.nn.functional.rms_norm(x, weight.shape, weight, layer.eps), x.view_as(x)
        return [*outs, *torch.autograd.grad(outs, (x, weight), [slope.to(x.dtype) for slope in slopes])]

    wide = plain(*(each.detach().double().requires_grad_() for each in (x, layer.weight)))
    pairs = dict(zip(("y", "x", "dx", "dweight"), zip(ours(), wide, strict=True), strict=True))
    return {**_near(pairs, 1e-2), "ours": machine.timed(ours), "torch": machine.timed(lambda: plain(x, layer.weight))}


def gate(machine: Machine, spec: RouterSpec, tokens: int, experts: int, topk: int) -> dict[str, float]:
    """Compare experts and counts exactly, and weights, sums and gradients with float64."""
    gate = TopKGate(ModelSpec(preset="tiny", experts=experts, topk=topk, router=spec))
    logits = (_random(machine, tokens, experts) * 2).requires_grad_()
    bias, rule = _random(machine, experts) * 0.1, gate.rule
    slopes = _random(machine, tokens, topk), _random(machine, 2, experts), _random(machine)
    assert rule is not None

    def ours() -> list[torch.Tensor]:
        found = routing.gate(logits, bias, 2, rule)
        ends = [found.weight_TK, found.score_BE, found.z]
        return [found.expert_TK, found.count_BE, *ends, *torch.autograd.grad(ends, logits, slopes)]

    def plain(x: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        expert, weight = gate(x, bias)
        chosen = expert.view(2, -1)
        count = chosen.new_zeros(2, experts).scatter_add_(1, chosen, torch.ones_like(chosen))
        ends = [weight, scores(x, spec).unflatten(0, (2, -1)).sum(1), x.logsumexp(-1).square().sum()]
        return [expert, count, *ends, *torch.autograd.grad(ends, x, [slope.to(x.dtype) for slope in slopes])]

    found = ours()
    assert all(map(torch.equal, found, ours())), "other bits the second time"
    wide = plain(logits.detach().double().requires_grad_(), bias.double())
    differing = float((found[0] != wide[0]).any(1).float().mean())  # float64 parts scores that are equal in float32
    assert differing < 1e-3, f"{differing:.2%} of tokens choose other experts"
    same = (found[0] == wide[0]).all(1)
    pairs = {"weights": (found[2][same], wide[2][same]), "gradient": (found[5][same], wide[5][same])}
    pairs |= {"scores": (found[3], wide[3]), "z": (found[4], wide[4])}
    return {**_near(pairs, 1e-4), "ours": machine.timed(ours), "torch": machine.timed(lambda: plain(logits, bias))}


def sort(machine: Machine, tokens: int, experts: int, topk: int) -> dict[str, float]:
    """Compare sorting and padding, with drops and without, and with idle experts."""
    order = torch.rand(tokens, max(topk, experts // 2), device=machine.device).argsort(1)[:, :topk].contiguous()
    keep = torch.rand(tokens, topk, device=machine.device) > 0.2
    for kept in (None, keep):
        found, most = sort_by_expert(order, kept, experts), tokens
        padded = pad_by_expert(order, kept, experts, most)
        with _torchs():
            assert all(map(torch.equal, found, sort_by_expert(order, kept, experts))), "other rows"
            assert all(map(torch.equal, padded, pad_by_expert(order, kept, experts, most))), "other padded rows"
    ours = machine.timed(lambda: sort_by_expert(order, None, experts))
    with _torchs():
        return {"ours": ours, "torch": machine.timed(lambda: sort_by_expert(order, None, experts))}


def halves(machine: Machine, tokens: int, experts: int) -> dict[str, float]:
    x = _random(machine, tokens, experts)
    found, ours = autograd._halves(x), machine.timed(lambda: autograd._halves(x))
    high, low = found.double().chunk(2, 1)
    off = _near({"sum": (high + low, x)}, 2**-14)
    with mock.patch.object(fused, "fits", return_value=False):
        return {**off, "ours": ours, "torch": machine.timed(lambda: autograd._halves(x))}


def add_groups(machine: Machine, experts: int, hidden: int, width: int) -> dict[str, float]:
    """Compare with a sum of gradients whose idle experts are zero."""
    gradient = _random(machine, experts, hidden, width).bfloat16()
    counts = torch.arange(experts, device=machine.device) % 5  # every fifth expert is idle
    total, ends = _random(machine, experts, hidden, width), counts.cumsum(0, dtype=torch.int32)
    want = total + gradient.masked_fill((counts == 0)[:, None, None], 0.0)
    gradient.masked_fill_((counts == 0)[:, None, None], torch.nan)
    fused.add_groups(total, gradient, ends)
    assert torch.equal(total, want), "other sums"
    plain = machine.timed(lambda: total.add_(gradient))
    return {"ours": machine.timed(lambda: fused.add_groups(total, gradient, ends)), "torch, all": plain}


@contextmanager
def _torchs() -> Iterator[None]:
    """Sort by torch's own path."""
    with mock.patch.object(routing, "sorts", return_value=False):
        yield


def _near(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], limit: float) -> dict[str, float]:
    """Return relative differences of norms, which must be below a limit."""
    off = {name: float((one.double() - other).norm() / other.double().norm()) for name, (one, other) in pairs.items()}
    assert max(off.values()) < limit, off
    return off


def _random(machine: Machine, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=machine.device)
