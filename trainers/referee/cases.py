"""The cases of `foldray verify --peer`: tiny models, their batches and their losses.

Names of tensors end with their shape: B sequences, L tokens of a sequence, T tokens of all sequences, E experts, V words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

VOCAB, LENGTH, SEQUENCES = 64, 16, 2  # SEQUENCES is the number of sequences in a rank's micro-batch
SEED = 0
IGNORED = -100
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A case for other projects.

    Args:
        model: a model type of transformers.
        settings: changes to the configuration of the model.
        masked: whether the first targets of every sequence do not count; their number is random.
        counted: whether the loss is divided by the number of targets of all ranks.
        documents: whether sequences hold several documents, told by positions that start again.
        z_loss: weight of a z-loss that is added here, because no supported model has one.
        recompute: whether activations are computed again (`gradient_checkpointing_enable`).
        micro_batches: number of micro-batches in a step.
    """

    model: str = "mixtral"
    settings: Mapping[str, Any] = field(default_factory=dict)
    masked: bool = False
    counted: bool = False
    documents: bool = False
    z_loss: float = 0.0
    recompute: bool = False
    micro_batches: int = 1


CASES: Mapping[str, Case] = {
    "as it is": Case(),
    "masked tokens": Case(masked=True),
    "masked tokens, counted": Case(masked=True, counted=True),
    "documents": Case(documents=True),
    "window": Case(settings={"sliding_window": 4}),
    "router": Case("qwen3_moe", {"norm_topk_prob": False}),
    "balance loss": Case(settings={"output_router_logits": True, "router_aux_loss_coef": 1.0}),
    "z-loss": Case(settings={"output_router_logits": True, "router_aux_loss_coef": 0.0}, z_loss=0.1),
    "sigmoid scores": Case("deepseek_v3"),
    "idle experts": Case("qwen3_moe", {"norm_topk_prob": False, "num_experts": 128, "num_experts_per_tok": 1}),
    "shared expert": Case("qwen2_moe"),
    "tied embedding": Case(settings={"tie_word_embeddings": True}),
    "recomputation": Case(recompute=True),
    "accumulation": Case(micro_batches=2),
}
"""Cases by name, in the order of foldray's own (`trainers/measure/cases.py`)."""

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.2, "use_cache": False,
    "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN = {"num_experts": 8, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": True}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "sliding_window": None},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_QWEN, "head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 0,
    },
}  # fmt: skip


def make_model(case: Case, dtype: torch.dtype) -> Any:
    """Make the random model of a case. All calls return equal weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.for_model(case.model, **{**_COMMON, **_MODELS[case.model], **case.settings})
    return AutoModelForCausalLM.from_config(config, **experts(dtype)).to(dtype).train()


def experts(dtype: torch.dtype) -> dict[str, str]:
    """Return how transformers computes experts, as an argument of its models: its default kernel refuses float64."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


class Batches(NamedTuple):
    """A step's data: inputs by micro-batch and data-parallel rank, and the number of targets in all of them."""

    inputs: Sequence[Sequence[Inputs]]
    targets: int


def whole(parts: Sequence[Inputs]) -> Inputs:
    """Return several inputs as one batch."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def make_batches(case: Case, dp: int) -> Batches:
    """Make random text that differs between ranks and micro-batches."""
    generator = torch.Generator().manual_seed(SEED + 1)
    inputs = [[_inputs(case, generator) for _ in range(dp)] for _ in range(case.micro_batches)]
    return Batches(inputs, sum(int((part["labels"][:, 1:] != IGNORED).sum()) for parts in inputs for part in parts))


def _inputs(case: Case, generator: torch.Generator) -> Inputs:
    token_BL = torch.randint(0, VOCAB, (SEQUENCES, LENGTH), generator=generator)
    inputs = {"input_ids": token_BL, "labels": token_BL}
    if case.masked:
        first_B1 = torch.randint(0, LENGTH - 1, (SEQUENCES, 1), generator=generator)
        inputs["labels"] = token_BL.masked_fill(torch.arange(LENGTH) < first_B1, IGNORED)
    if case.documents:
        starts_BL = (torch.rand(token_BL.shape, generator=generator) < 0.25).index_fill(1, torch.tensor([0]), True)
        position_BL = torch.arange(LENGTH).expand_as(token_BL)
        inputs["position_ids"] = position_BL - (position_BL * starts_BL).cummax(1).values
    return inputs


def loss_of(case: Case, model: Any, inputs: Inputs, targets: float | None = None) -> Tensor:
    """Run a model of transformers and return its loss, as a user would.

    Args:
        targets: what the sum over targets is divided by; None for their number in this batch.
    """
    counted = {} if targets is None else {"num_items_in_batch": torch.tensor(targets)}
    output = model(**inputs, **counted)
    if not case.z_loss:
        return output.loss
    logit_TE = torch.cat(list(output.router_logits)).float()
    return output.loss + case.z_loss * logit_TE.logsumexp(-1).square().mean()
