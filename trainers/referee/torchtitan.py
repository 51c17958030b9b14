"""A rank of torchtitan: its Qwen3 with experts, its FSDP, tensor and expert parallelism, its loss and its norm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.distributed.utils as titan
import torchtitan.models.qwen3 as qwen3
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from trainers.referee.cases import IGNORED, SEED, VOCAB, Batches, Case, Inputs
from trainers.referee.rank import Gradients, Layout, whole_gradients

_HIDDEN, _HEAD = 32, 8
_BACKEND = "partial_dtensor"  # torchtitan's default, spmd_types, needs a newer torch


class Torchtitan:
    """A model of torchtitan (`rank.Peer`). Its loss is the sum over targets, divided by those of all ranks."""

    def __init__(self, case: Case, layout: Layout, dtype: torch.dtype, folder: Path) -> None:
        settings = dict(layout.settings)
        replicas = settings.pop("replicas", 1)
        parallelism = ParallelismConfig(
            tensor_parallel_degree=layout.tp, expert_parallel_degree=layout.ep, data_parallel_replicate_degree=replicas,
            data_parallel_shard_degree=layout.dp // replicas, spmd_backend=settings.pop("backend", _BACKEND),
        )  # fmt: skip
        self.layout, self.backend = layout, parallelism.spmd_backend
        titan.set_spmd_backend(self.backend)
        self.dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        self.dims.build_mesh()
        model = _made(case, _config(case, layout)).to(dtype)
        self.model = qwen3.parallelize_qwen3(
            model, parallel_dims=self.dims, parallelism=parallelism, compile_config=CompileConfig(), ac_config=None,
            training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"), dump_folder="",
        )  # fmt: skip
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor

    def evaluate(self, batches: Batches, dp_rank: int, targets: float | None) -> Tensor:
        count = sum(_targets(part) for part in batches.inputs[0])
        self.model.eval()
        with torch.no_grad():
            loss = self._loss(batches.inputs[0][dp_rank], count)
        self.model.train()
        return loss * self.layout.dp

    def train(self, batches: Batches, dp_rank: int, targets: float | None) -> tuple[Tensor, Gradients, float | None]:
        losses = []
        for parts in batches.inputs:
            loss = self._loss(parts[dp_rank], batches.targets)
            loss.backward()
            losses.append(loss.detach())
        gradients = {name: each.clone() for name, each in whole_gradients(self.model).items()}
        norm = titan.clip_grad_norm_(list(self.model.parameters()), 1e9, ep_enabled=self.layout.ep > 1)
        return torch.stack(losses).sum() * self.layout.dp, gradients, float(norm)

    def _loss(self, inputs: Inputs, targets: float) -> Tensor:
        token_BL, label_BL = _text(inputs)
        if self.backend == "spmd_types":
            token_BL, label_BL, _ = annotate_input_spmd_types(self.dims, token_BL, label_BL, {})
        with titan.get_spmd_context(parallel_dims=self.dims)():
            return cross_entropy_loss(self.model(token_BL), label_BL, global_vocab_size=VOCAB) / targets

    def pieces(self, gradients: Gradients, expected: Gradients) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, gradient in gradients.items():
            yield name, gradient, expected[name]

    @staticmethod
    def alone(case: Case, dtype: torch.dtype) -> Any:
        return _made(case, _config(case, Layout(1, 1, 1))).to(dtype)

    @staticmethod
    def loss(case: Case, model: Any, inputs: Inputs, targets: float | None = None) -> Tensor:
        backend = titan.get_spmd_backend()
        titan.set_spmd_backend("partial_dtensor")  # one process has no mesh
        try:
            token_BL, label_BL = _text(inputs)
            loss = cross_entropy_loss(model(token_BL), label_BL)
        finally:
            titan.set_spmd_backend(backend)
        return loss / (_targets(inputs) if targets is None else targets)


def _text(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return tokens and the ones after them. The last has none, since TP must divide their number."""
    label_BL = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
    return inputs["input_ids"], label_BL


def _targets(inputs: Inputs) -> int:
    return int((_text(inputs)[1] != IGNORED).sum())


def _config(case: Case, layout: Layout) -> Any:
    """Describe a model that resembles the case's model of transformers."""
    qwen3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()  # the only one for a processor
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2, dim=_HIDDEN, n_heads=4, n_kv_heads=2, head_dim=_HEAD, moe_hidden_dim=32, fuse_qkv=False,
        num_experts=case.settings.get("num_experts", 8), top_k=case.settings.get("num_experts_per_tok", 2), attn_backend="",
        moe_comm_backend="standard", rope=CosSinRoPE.Config(dim=_HEAD, max_seq_len=64, theta=1e4),
    )  # fmt: skip
    for layer in layers:
        layer.moe.router.route_norm = case.settings.get("norm_topk_prob", True)
        layer.moe.router.score_func = "sigmoid" if case.model == "deepseek_v3" else "softmax"
        if case.model in ("deepseek_v3", "qwen2_moe"):
            initial = qwen3._LINEAR_INIT
            layer.moe.shared_experts = make_ffn_config(dim=_HIDDEN, hidden_dim=32, w1_param_init=initial, w2w3_param_init=initial)
    config = qwen3.Qwen3Model.Config(
        vocab_size=VOCAB, dim=_HIDDEN, norm=qwen3._qwen3_norm(_HIDDEN), layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=_HIDDEN, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=_HIDDEN, out_features=VOCAB, param_init=qwen3._LINEAR_INIT),
    )  # fmt: skip
    set_qwen3_sharding_config(config, enable_sp=layout.tp > 1, enable_ep=layout.ep > 1)
    return config


def _made(case: Case, config: Any) -> Any:
    # Experts are rounded to bfloat16, which would hide faults below 1e-2. Here they keep their type.
    setattr(torch.Tensor, "bfloat16", lambda self: self)  # noqa: B010
    model = config.build()
    model.init_states()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name))
    return model
