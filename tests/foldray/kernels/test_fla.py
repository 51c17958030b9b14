"""Linear attention by the kernels of flash-linear-attention, for which plain functions stand in.

The stand-ins take what the kernels take, and refuse what they do not. `tests/gpu/fused.py` has the kernels themselves.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foldray.kernels import fla
from foldray.kernels.delta import delta_rule
from foldray.model import Batch, Cache
from tests.foldray.kernels.test_delta import Inputs
from tests.foldray.model.test_linear import KIMI, made
from tests.foldray.model.test_transformer import tokens
from tests.gpu import fused


class Kernels:
    """The modules of the library that have kernels.

    Attributes:
        narrow, wide: the types of what they read and of states. A model whose types are both float64 gets exact results.
        states: the states with which they were called.
    """

    def __init__(self) -> None:
        self.narrow, self.wide = torch.bfloat16, torch.float32
        self.states: list[Tensor] = []

    def module(self, name: str) -> Any:
        functions = {"fla.ops.kda": self.chunk_kda, "fla.ops.gated_delta_rule": self.chunk_gated_delta_rule}
        return SimpleNamespace(**{functions[name].__name__: functions[name]}) if name in functions else import_module(name)

    def chunk_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, **given: Any
    ) -> tuple[Tensor, Tensor]:
        assert g.shape == v.shape[:3], "a decay of each head"
        return self._computed(q, k, v, g.unsqueeze(-1), beta, scale, **given)

    def chunk_kda(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, **given: Any
    ) -> tuple[Tensor, Tensor]:
        assert g.shape == (*v.shape[:3], k.shape[3]), "a decay of each column"
        return self._computed(q, k, v, g, beta, scale, **given)

    def _computed(
        self,
        *tensors: Any,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, scale = tensors
        assert q.dtype == k.dtype == v.dtype == self.narrow
        assert q.shape == k.shape
        assert q.shape[3] <= 256
        assert beta.shape == v.shape[:3]
        assert initial_state is not None
        assert initial_state.dtype == g.dtype == beta.dtype == self.wide
        assert initial_state.shape == (len(v), v.shape[2], k.shape[3], v.shape[3])
        self.states.append(initial_state.detach())
        scale = k.shape[3] ** -0.5 if scale is None else scale
        out, state = delta_rule(*(x.double() for x in (q * scale, k, v, g, beta, initial_state)))
        return out.to(self.narrow), state.to(self.wide) if output_final_state else torch.empty(0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr(fla, "import_module", kernels.module)
    return kernels


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> Kernels:
    """The kernels, which models in float64 use on a CPU."""
    kernels.narrow = kernels.wide = torch.float64
    monkeypatch.setattr(fla, "fits", lambda x, width, within_BS: within_BS is None)
    return kernels


@pytest.mark.parametrize("columns", [1, 5])
def test_results_are_those_of_plain_products(columns: int, kernels: Kernels) -> None:
    given = Inputs.drawn(70, columns, dtype=torch.float32)
    wide = Inputs(*(x.detach().double().requires_grad_() for x in given))
    found, expected = fla.delta_rule(*given, torch.bfloat16), delta_rule(*wide)
    assert (found[0].dtype, found[1].dtype) == (torch.bfloat16, torch.float32)
    ends = (sum(x.double().square().sum() for x in results) for results in (found, expected))
    gradients = (torch.autograd.grad(end, leaves) for end, leaves in zip(ends, (given, wide), strict=True))  # type: ignore[arg-type]
    for mine, other in zip((*found, *next(gradients)), (*expected, *next(gradients)), strict=True):
        assert (mine.double() - other).norm() < 2**-7 * other.norm()


@pytest.mark.parametrize("changes", [{}, KIMI], ids=["gated", "kimi"])
@pytest.mark.parametrize("slices", [[90], [64, 25, 1]], ids=str)
def test_a_model_takes_their_results(
    changes: dict[str, Any], slices: list[int], used: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = made(**changes), tokens(2, 90)

    def computed() -> list[Tensor]:
        growing = Cache(model, sequences=2)
        logits = torch.cat([model.head_logits(growing.extend(part)) for part in text.split(slices, dim=1)], dim=1)
        model.zero_grad()
        model.logits(text).square().sum().backward()
        return [logits, *(x.grad for x in model.parameters() if x.grad is not None)]

    found = computed()
    blocks = 2 * (len(slices) + 2)  # two linear blocks: the slices, the whole sequence, and once more in its backward
    assert len(used.states) == blocks
    assert sum(bool(state.any()) for state in used.states) == 2 * (len(slices) - 1), "a slice begins where the last one ended"
    monkeypatch.undo()
    torch.testing.assert_close(found, computed(), atol=1e-10, rtol=1e-10)
    assert len(used.states) == blocks


def test_documents_stay_with_torch(used: Kernels) -> None:
    model, text = made(), tokens(1, 20)
    model.hidden(Batch(text, text, torch.tensor([0] * 8 + [1] * 12)[None]))
    assert not used.states


def test_what_the_kernels_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 2, 3, dtype=torch.bfloat16)
    assert not fla.fits(x, 128, None), "on a CPU"
    monkeypatch.setattr(fla, "has_triton", lambda: True)
    monkeypatch.setattr(fla, "_has_fla", lambda: True)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=x.dtype, numel=lambda: 6)
    assert fla.fits(on_gpu, 128, None)  # type: ignore[arg-type]
    for changed, width, within in (
        ({"dtype": torch.float32}, 128, None),
        ({}, 257, None),
        ({}, 128, x),
        ({"numel": lambda: 0}, 128, None),
    ):
        assert not fla.fits(SimpleNamespace(**{**vars(on_gpu), **changed}), width, within)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gated_delta", "kimi_delta"])
def test_the_check_for_gpus(kind: str, kernels: Kernels) -> None:
    found = fused.delta(fused.Machine(torch.device("cpu"), lambda call: (call(), 1.0)[1]), kind, 70, 2, 16)
    assert found.keys() == {"out", "state", "dq", "dk", "dv", "ddecay", "dwrite", "dstate", "ours", "torch"}
