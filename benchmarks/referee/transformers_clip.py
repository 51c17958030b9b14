"""transformers 5.23.0 with a loop of your own: torch's clipping takes experts and other weights in no one call.

pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
torchrun --nproc-per-node 2 transformers_clip.py
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
    "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
dist.init_process_group("gloo")
folder = os.path.join(tempfile.gettempdir(), "transformers_clip")
if dist.get_rank() == 0:
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES)).save_pretrained(folder)
dist.barrier()
config = DistributedConfig(fsdp_size=2, ep_size=2)
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).train()
tokens = torch.randint(0, 64, (2, 16))
model(input_ids=tokens, labels=tokens).loss.backward()
try:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
except RuntimeError as error:  # experts and other weights are on different meshes; transformers' own trainer has a method
    print(f"expected: a norm; got: RuntimeError: {str(error).splitlines()[0]}")
    sys.exit(1)
print("expected: a norm; got: a norm")
