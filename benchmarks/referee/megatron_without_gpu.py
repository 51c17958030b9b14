"""Megatron-Core 0.16.1: its MoE layer does not run without a GPU.

pip install torch==2.13.0 megatron-core==0.16.1
torchrun --nproc-per-node 2 megatron_without_gpu.py
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module

SIZES = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 4, "ffn_hidden_size": 48,
    "moe_router_topk": 2, "add_bias_linear": False, "use_cpu_initialization": True, "expert_model_parallel_size": 2,
}  # fmt: skip
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
failed = False
for dispatcher in ("alltoall", "allgather"):
    try:
        build_module(spec, config=TransformerConfig(moe_token_dispatcher_type=dispatcher, **SIZES))(torch.randn(4, 2, 32))
    except (RuntimeError, AssertionError) as error:  # a CUDA stream; torch.cuda.current_device() in router.py, gating
        print(f"{dispatcher}, expected: an output; got: {type(error).__name__}: {str(error).splitlines()[0]}")
        failed = True
sys.exit(failed)
