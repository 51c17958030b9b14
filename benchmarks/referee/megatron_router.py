"""Megatron-Core 0.16.1: without TransformerEngine, its router stops in every precision.

pip install torch==2.13.0 megatron-core==0.16.1
python megatron_router.py
"""

import sys

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear

x_TD, weight_ED = torch.randn(4, 8), torch.randn(2, 8)
expected = x_TD @ weight_ED.T
try:
    got = router_gating_linear(x_TD, weight_ED, None, torch.float32)
except NameError as error:  # megatron/core/transformer/moe/moe_utils.py imports the name with TransformerEngine alone
    print(f"logit, expected: {float(expected[0, 0]):.6f}; got: NameError: {error}")
    sys.exit(1)
print(f"logit, expected: {float(expected[0, 0]):.6f}; got: {float(got[0, 0]):.6f}")
sys.exit(not torch.allclose(got, expected))
