"""DeepSpeed 0.19.8, AutoEP without ZeRO: clipping takes the mean over ranks of the norms of what each holds.

pip install torch==2.13.0 transformers==5.23.0 deepspeed==0.19.8
torchrun --nproc-per-node 2 deepspeed_norm_zero0.py
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch
from deepspeed.runtime.utils import clip_grad_norm_
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
tokens = torch.randint(0, 64, (4, 16))
model(input_ids=tokens, labels=tokens).loss.backward()
expected = float(torch.stack([each.grad.norm() for each in model.parameters()]).norm())  # one process
model.zero_grad()
config = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    "expert_parallel": {"enabled": True, "autoep_size": 2},
}  # fmt: skip
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled first, for minutes
deepspeed.init_distributed("gloo", verbose=False)
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
mine = tokens.chunk(2)[torch.distributed.get_rank()]
engine.backward(engine(input_ids=mine, labels=mine).loss)
got = float(clip_grad_norm_(engine.module.parameters(), 1e9, mpu=engine.mpu))  # what engine.step() clips by
print(f"norm, expected: {expected:.6f}; got: {got:.6f}")
sys.exit(abs(got / expected - 1) > 1e-4)
