"""torchtitan 0.3.0 on torch 2.13.0: its default backend, spmd_types, stops before training; partial_dtensor trains.

pip install torch==2.13.0 torchtitan==0.3.0 triton
torchrun --nproc-per-node 2 torchtitan_spmd_types.py
"""

import sys

import torch

torch._utils._get_available_device_type = lambda: "cpu"  # without a GPU, torchtitan takes one for granted
import torch.distributed as dist
import torchtitan.distributed.utils as utils
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.qwen3 import model_registry, parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

dist.init_process_group("gloo")
parallelism = ParallelismConfig(expert_parallel_degree=2, data_parallel_shard_degree=2)
dims = ParallelDims.from_config(parallelism, dist.get_world_size())
dims.build_mesh()
utils.set_spmd_backend(parallelism.spmd_backend)
config = model_registry("debugmodel_moe").model
config.layers = config.layers[:1]
set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
given = {"training": TrainingConfig(), "compile_config": CompileConfig(), "ac_config": None, "dump_folder": ""}
try:
    parallelize_qwen3(config.build(), parallel_dims=dims, parallelism=parallelism, **given)
except ValueError as error:  # torch/distributed/fsdp/_fully_shard, called by torchtitan/distributed/fsdp.py
    print(f"expected: a model; got: ValueError: {error}")
    sys.exit(1)
print("expected: a model; got: a model")
