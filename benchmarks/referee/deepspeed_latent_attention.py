"""DeepSpeed 0.19.8, AutoTP with AutoEP: half of the gradient of DeepSeek's shared key is missing.

pip install torch==2.13.0 transformers==5.23.0 deepspeed==0.19.8
torchrun --nproc-per-node 2 deepspeed_latent_attention.py
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 0, "initializer_range": 0.2,
}  # fmt: skip
KEY = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # its last 8 rows make the key that all heads share
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **SIZES)).train()
tokens = torch.randint(0, 64, (2, 16))
model(input_ids=tokens, labels=tokens).loss.backward()
expected = float(model.get_parameter(KEY).grad[-8:].norm())  # one process
model.zero_grad()
config = {
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "expert_parallel": {"enabled": True, "autoep_size": 2},
    "tensor_parallel": {"autotp_size": 2, "preset_model": "deepseek_v2"},
}  # fmt: skip
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled first, for minutes
deepspeed.init_distributed("gloo", verbose=False)
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
engine.backward(engine(input_ids=tokens, labels=tokens).loss)
got = float(safe_get_full_grad(engine.module.get_parameter(KEY))[-8:].norm())
print(f"gradient of the shared key, expected: {expected:.6f}; got: {got:.6f}")
sys.exit(abs(got / expected - 1) > 1e-4)
