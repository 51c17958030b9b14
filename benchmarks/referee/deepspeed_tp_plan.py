"""DeepSpeed 0.19.8: AutoTP does not take the plan that transformers 5.23.0 has for Mixtral.

pip install torch==2.13.0 transformers==5.23.0 deepspeed==0.19.8
torchrun --nproc-per-node 2 deepspeed_tp_plan.py
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import output_capturing

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
registry, plain = output_capturing._CanRecordRegistry, output_capturing._CanRecordRegistry.get
registry.get = lambda self, key, *rest: dict.get(self, key, *rest) if rest else plain(self, key)  # deepspeed_autoep_model.py
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES)).train()
config = {
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "expert_parallel": {"enabled": True, "autoep_size": 2},
    "tensor_parallel": {"autotp_size": 2},
}  # fmt: skip
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled first, for minutes
deepspeed.init_distributed("gloo", verbose=False)
try:
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
except Exception as error:  # deepspeed/module_inject/tp_plan_converter.py
    print(f"expected: an engine; got: {type(error).__name__}: {str(error).splitlines()[0]}")
    sys.exit(1)
print("expected: an engine; got: an engine")
