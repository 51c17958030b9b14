"""Modules that the pool's processes share. `tests/pool.py` has the server import this module before it forks them.

Optimizers and DeepSpeed import large packages when they are first used. That takes more than a second in every process.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

_MODULES = (
    "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer", "trainers.worker.deepspeed_engine", "trainers.worker.engines",
    "tests.foldray.parity",
)  # fmt: skip

for _name in _MODULES:
    with suppress(ImportError):  # a test that needs the module says that it is missing
        import_module(_name)
gc.freeze()  # collections of garbage need not look at all these modules
