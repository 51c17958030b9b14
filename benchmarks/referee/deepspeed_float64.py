"""DeepSpeed 0.19.8 with AutoEP reduces no gradient in float64.

pip install torch==2.13.0 transformers==5.23.0 deepspeed==0.19.8
torchrun --nproc-per-node 2 deepspeed_float64.py
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled first, for minutes
deepspeed.init_distributed("gloo", verbose=False)
model = torch.nn.Linear(4, 4, dtype=torch.float64)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
try:
    engine.backward(engine(torch.ones(1, 4, dtype=torch.float64)).sum())
except AssertionError as error:  # deepspeed/runtime/engine.py, split_half_float_double_sparse
    print(f"expected: gradients in float64; got: AssertionError: {error}")
    sys.exit(1)
print("expected: gradients in float64; got: gradients in float64")
