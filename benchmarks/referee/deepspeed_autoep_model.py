"""DeepSpeed 0.19.8: AutoEP stops at Mixtral of transformers 5.23.0, and at Qwen2-MoE and Qwen3-MoE.

pip install torch==2.13.0 transformers==5.23.0 deepspeed==0.19.8
torchrun --nproc-per-node 2 deepspeed_autoep_model.py
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip

model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES))
config = {"train_micro_batch_size_per_gpu": 2, "expert_parallel": {"enabled": True, "autoep_size": 2}}
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled first, for minutes
deepspeed.init_distributed("gloo", verbose=False)
try:
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
except TypeError as error:  # deepspeed/module_inject/auto_ep_presets/base.py asks a registry of transformers for a default
    print(f"expected: an engine; got: TypeError: {error}")
    sys.exit(1)
print("expected: an engine; got: an engine")
