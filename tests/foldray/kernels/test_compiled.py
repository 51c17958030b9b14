"""Our own kernels compile for an H100, which needs no GPU: Triton's interpreter takes more than its compiler does."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from foldray.kernels import fused, routing
from tests.foldray.kernels.test_fused import INTERPRETED

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32", torch.bool: "i1"}
TARGET = "cuda", 90, 32

compiles = pytest.mark.skipif(find_spec("triton") is None or INTERPRETED, reason="needs Triton, which must not interpret")


def compiled(kernel: str, grid: tuple[int, ...], *given: Any, module: str = "fused_kernels", warps: int = 4) -> None:
    """Compile what would be launched, but launch nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(f"foldray.kernels.{module}"), kernel)
    signature, constants = dict[str, str](), dict[tuple[int], Any]()
    for number, (parameter, value) in enumerate(zip(function.params, given, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[number,] = "constexpr", value
        else:
            kind = "*" + TYPES[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"
            signature[parameter.name] = kind
    source = ASTSource(function, signature, constants)
    assert triton.compile(source, target=GPUTarget(*TARGET), options={"num_warps": warps}).asm["cubin"]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module in ("fused_kernels", "routing_kernels"):  # with the compiler, if others have had it interpreted
        monkeypatch.delitem(sys.modules, f"foldray.kernels.{module}", raising=False)
    for module in (fused, routing):
        monkeypatch.setattr(module, "launch", compiled)


@compiles
@pytest.mark.parametrize("experts", [8, 128, 1000])
@pytest.mark.parametrize("rule", [(False, True, False), (False, False, True), (True, False, True)], ids=str)
def test_gate(compiling: None, experts: int, rule: tuple[bool, bool, bool]) -> None:
    logits_TE = torch.zeros(64, experts, requires_grad=True)
    found = routing.gate(logits_TE, torch.zeros(experts), 2, routing.GateRule(3, *rule, 1.0))
    (found.weight_TK.sum() + found.z).backward()


@compiles
@pytest.mark.parametrize("experts", [8, 130])
@pytest.mark.parametrize("drops", [False, True])
def test_sort(compiling: None, experts: int, drops: bool) -> None:
    expert_TK = torch.zeros(9, 3, dtype=torch.int64)
    keep_TK = torch.ones(9, 3, dtype=torch.bool) if drops else None
    routing.sort(expert_TK, keep_TK, experts)
    routing.pad(expert_TK, keep_TK, experts, 30)


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_norms(compiling: None, dtype: torch.dtype) -> None:
    x_BSW, table_SR = torch.zeros(1, 5, 12 * 128, dtype=dtype, requires_grad=True), torch.zeros(5, 32)
    for bias in (None, torch.zeros(12 * 128, dtype=dtype)):
        q, k, v = fused.split_rotate(x_BSW, bias, table_SR, table_SR, fused.Heads(8, 2, 128))
        torch.autograd.grad([q, k, v], x_BSW, [q, k, v])
    for hidden in (40, 8192):
        x = torch.zeros(3, hidden, dtype=dtype, requires_grad=True)
        normed, same = fused.norm_beside(x, torch.nn.Parameter(torch.zeros(hidden, dtype=dtype)), 1e-6)
        (normed + same).sum().backward()


@compiles
def test_sums(compiling: None) -> None:
    fused.add_groups(torch.zeros(3, 4, 5), torch.zeros(3, 4, 5).bfloat16(), torch.zeros(3, dtype=torch.int32))
    fused.halves(torch.zeros(3, 130))
