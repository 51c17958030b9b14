"""DeepSpeed 0.19.8, AutoTP with AutoEP and ZeRO-2: the gradient norm counts experts only on the first rank of a TP group.

pip install torch==2.13.0 transformers==5.23.0 deepspeed==0.19.8
torchrun --nproc-per-node 2 deepspeed_norm_tp_ep.py
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import output_capturing

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2,
}  # fmt: skip
registry, plain = output_capturing._CanRecordRegistry, output_capturing._CanRecordRegistry.get
registry.get = lambda self, key, *rest: dict.get(self, key, *rest) if rest else plain(self, key)  # deepspeed_autoep_model.py
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES)).train()
tokens = torch.randint(0, 64, (2, 16))
model(input_ids=tokens, labels=tokens).loss.backward()
expected = float(torch.stack([each.grad.norm() for each in model.parameters()]).norm())  # one process
model.zero_grad()
kinds = {"column": "[qkv]_proj", "row": "o_proj"}
cut = [{"patterns": [rf".*self_attn\.{name}\.weight$"], "partition_type": kind} for kind, name in kinds.items()]
config = {
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "expert_parallel": {"enabled": True, "autoep_size": 2},
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": cut}},
}  # fmt: skip
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled first, for minutes
deepspeed.init_distributed("gloo", verbose=False)
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
engine.backward(engine(input_ids=tokens, labels=tokens).loss)
engine.step()
got = float(engine.get_global_grad_norm())  # deepspeed/runtime/zero/stage_1_and_2.py, complete_grad_norm_calculation
print(f"norm, expected: {expected:.6f}; got: {got:.6f}")
sys.exit(abs(got / expected - 1) > 1e-4)
