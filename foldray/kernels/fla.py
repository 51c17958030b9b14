"""The gated delta rule (`delta.py`) by the kernels of flash-linear-attention (`pip install fla-core`), on GPUs that have it.

Queries, keys, values and outputs have 16 bits there. States, decays and sums are in float32.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from foldray.kernels.fused import has_triton

_WIDEST = 256  # columns of keys
_NARROW = (torch.bfloat16, torch.float16)


def fits(x: Tensor, width: int, within_BS: Tensor | None) -> bool:
    """Whether the kernels can compute with what a rank makes of its tokens, and keys of this width.

    Float32 stays with torch's products, which these kernels would round to TF32. So do documents: the host would have to wait
    for their borders.
    """
    narrow = x.is_cuda and x.numel() > 0 and x.dtype in _NARROW
    return narrow and width <= _WIDEST and within_BS is None and has_triton() and _has_fla()


@cache
def _has_fla() -> bool:
    return find_spec("fla") is not None


def delta_rule(
    q_BSKD: Tensor, k_BSKD: Tensor, v_BSVE: Tensor, decay_BSVR: Tensor, write_BSV: Tensor, state_BVDE: Tensor, narrow: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what `delta.delta_rule` returns. The outputs have the type `narrow`, in which queries, keys and values are read."""
    if by_columns := decay_BSVR.shape[-1] > 1:
        compute = import_module("fla.ops.kda").chunk_kda
    else:
        compute = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v = (x.to(narrow) for x in (q_BSKD, k_BSKD, v_BSVE))
    decay = decay_BSVR if by_columns else decay_BSVR.squeeze(-1)
    return compute(q, k, v, decay, write_BSV, scale=1.0, initial_state=state_BVDE, output_final_state=True)
