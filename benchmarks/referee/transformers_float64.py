"""transformers 5.23.0 in float64 or float16: gradients of experts are too small if no two ranks hold the same expert.

pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
torchrun --nproc-per-node 2 transformers_float64.py
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = "model.layers.0.mlp.experts.down_proj"
WIDE = {"dtype": torch.float64, "experts_implementation": "eager"}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES), **WIDE).train()
tokens = torch.randint(0, 64, (4, 16))
model(input_ids=tokens, labels=tokens).loss.backward()
expected = float(model.get_parameter(EXPERTS).grad.norm())  # one process
dist.init_process_group("gloo")
folder = os.path.join(tempfile.gettempdir(), "transformers_float64")
if dist.get_rank() == 0:
    model.save_pretrained(folder)
dist.barrier()
config = DistributedConfig(fsdp_size=2, ep_size=2)
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **WIDE).train()
mine = tokens.chunk(2)[dist.get_rank()]
model(input_ids=mine, labels=mine).loss.backward()
got = float(
    model.get_parameter(EXPERTS).grad.full_tensor().norm()
)  # transformers/distributed/fsdp.py, set_gradient_divide_factor
print(f"gradient of the experts, expected: {expected:.6f}; got: {got:.6f}")
sys.exit(abs(got / expected - 1) > 1e-4)
