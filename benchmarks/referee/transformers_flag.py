"""transformers 5.23.0: `enable_expert_parallel` without `ep_size`, which is deprecated and documented, is refused.

pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
torchrun --nproc-per-node 2 transformers_flag.py
"""

import os
import sys
import tempfile

import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
dist.init_process_group("gloo")
folder = os.path.join(tempfile.gettempdir(), "transformers_flag")
if dist.get_rank() == 0:
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES)).save_pretrained(folder)
dist.barrier()
config = DistributedConfig(tp_size=2, enable_expert_parallel=True)
try:
    AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
except ValueError as error:  # transformers/distributed/mixin.py, _resolve_parallel_plans
    print(f"expected: a model; got: ValueError: {error}")
    sys.exit(1)
print("expected: a model; got: a model")
