"""A rank of Megatron-Core: its MoE layer alone, without its optimizer and its reduction of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as dispatchers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from trainers.referee.cases import SEED, Batches, Case, Inputs
from trainers.referee.rank import Gradients, Layout

_HIDDEN, _FFN, _SHARED, _VOCAB = 32, 48, 64, 64


class Loop(nn.Module):
    """The plain layer: every expert in a loop. Weights are whole, and called as Megatron calls them.

    Args:
        case: the case.
        dtype: type of all numbers.
    """

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.case, self.experts, self.top = case, case.settings.get("num_experts", 8), case.settings.get("num_experts_per_tok", 2)
        generator = torch.Generator().manual_seed(SEED)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.2).to(dtype))

        self.router = made(self.experts, _HIDDEN)
        self.fc1, self.fc2 = made(self.experts, 2 * _FFN, _HIDDEN), made(self.experts, _HIDDEN, _FFN)
        if case.model == "qwen2_moe":
            self.shared1, self.shared2 = made(2 * _SHARED, _HIDDEN), made(_HIDDEN, _SHARED)
        self.rows = made(_VOCAB, _HIDDEN)  # the inputs of the layer
        self.wanted = made(_VOCAB, _HIDDEN).requires_grad_(False)  # what its loss multiplies

    def forward(self, x_TD: Tensor) -> Tensor:
        logit_TE = F.linear(x_TD, self.router)
        if self.case.model == "deepseek_v3":
            score_TK, expert_TK = logit_TE.sigmoid().topk(self.top)
            score_TK = score_TK / score_TK.sum(-1, keepdim=True)
        elif self.case.settings.get("norm_topk_prob", True):
            score_TK, expert_TK = logit_TE.topk(self.top)
            score_TK = score_TK.softmax(-1)
        else:
            score_TK, expert_TK = logit_TE.softmax(-1).topk(self.top)
        weight_TE = torch.zeros_like(logit_TE).scatter(-1, expert_TK, score_TK)
        outputs = [weight_TE[:, e : e + 1] * _ffn(x_TD, self.fc1[e], self.fc2[e]) for e in range(self.experts)]
        out_TD = torch.stack(outputs).sum(0)
        return out_TD + _ffn(x_TD, self.shared1, self.shared2) if self.case.model == "qwen2_moe" else out_TD


def _ffn(x_TD: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate_TF, up_TF = F.linear(x_TD, up).chunk(2, -1)
    return F.linear(F.silu(gate_TF) * up_TF, down)


class Megatron:
    """Megatron's MoE layer between given inputs and a given gradient (`rank.Peer`).

    A token of a batch gives the layer a row of `Loop.rows`, and the loss is the mean product of the output with `Loop.wanted`.
    Gradients are summed over the ranks that hold the same weights, which Megatron leaves to its optimizer. There is no norm.
    """

    alone = Loop

    def __init__(self, case: Case, layout: Layout, dtype: torch.dtype, folder: Path) -> None:
        settings = dict(layout.settings)
        if not settings.pop("as_installed", False):
            _without_gpu()
        self.layout, self.case, self.etp = layout, case, settings.get("etp", 1)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=self.etp
        )
        self.whole = Loop(case, dtype)
        config = TransformerConfig(
            num_layers=1, hidden_size=_HIDDEN, num_attention_heads=4, num_moe_experts=self.whole.experts, ffn_hidden_size=_FFN,
            moe_ffn_hidden_size=_FFN, moe_router_topk=self.whole.top, gated_linear_unit=True, activation_func=F.silu,
            add_bias_linear=False, bias_activation_fusion=False, params_dtype=dtype, use_cpu_initialization=True,
            moe_token_dispatcher_type=settings["dispatcher"], moe_router_load_balancing_type="none",
            moe_router_score_function="sigmoid" if case.model == "deepseek_v3" else "softmax",
            moe_router_pre_softmax=not case.settings.get("norm_topk_prob", True),
            moe_shared_expert_intermediate_size=_SHARED if case.model == "qwen2_moe" else None,
            tensor_model_parallel_size=layout.tp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=self.etp,
            sequence_parallel=layout.tp > 1,
        )  # fmt: skip
        spec = get_moe_module_spec(use_te=False, num_experts=self.whole.experts, moe_grouped_gemm=False)
        self.layer = build_module(spec, config=config)
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                parameter.copy_(self._piece(name, dict(self.whole.named_parameters()))[1])

    def evaluate(self, batches: Batches, dp_rank: int, targets: float | None) -> Tensor:
        with torch.no_grad():
            return self._loss(batches.inputs[0][dp_rank])[0]

    def train(self, batches: Batches, dp_rank: int, targets: float | None) -> tuple[Tensor, Gradients, float | None]:
        loss, share = self._loss(batches.inputs[0][dp_rank])
        share.backward()
        gradients = {name: each.grad for name, each in self.layer.named_parameters()}
        for name, gradient in gradients.items():
            dist.all_reduce(gradient.div_(self.layout.dp), group=self._holders(name))
        gradients["rows"] = self.whole.rows.grad.div_(self.layout.dp)  # type: ignore[union-attr]
        dist.all_reduce(gradients["rows"])
        return loss.detach(), gradients, None

    def _loss(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the loss of this rank's sequences, and this rank's share of it: with TP, it has a part of each sequence."""
        tp_rank, id_BL = parallel_state.get_tensor_model_parallel_rank(), inputs["input_ids"]
        part_LB = id_BL.t().contiguous().chunk(self.layout.tp)[tp_rank]
        out_LBD, _ = self.layer(self.whole.rows[part_LB])
        share = (out_LBD * self.whole.wanted[part_LB]).sum() / id_BL.numel()
        loss = share.detach().clone()
        dist.all_reduce(loss, group=parallel_state.get_tensor_model_parallel_group())
        return loss, share

    def _holders(self, name: str) -> Any:
        """Return the group of the ranks that hold the same weights and have other tokens."""
        if ".local_experts." in name:
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group() if "shared" in name else None

    def pieces(self, gradients: Gradients, expected: Gradients) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, gradient in gradients.items():
            called, piece = ("rows", expected["rows"]) if name == "rows" else self._piece(name, expected)
            yield called, gradient, piece

    def _piece(self, name: str, whole: Gradients) -> tuple[str, Tensor]:
        """Return what a weight of Megatron is called in `Loop`, and the part that this rank holds."""
        if "router" in name:
            return "router", whole["router"]
        layer = "1" if "fc1" in name else "2"
        if "shared" in name:
            size, rank = self.layout.tp, parallel_state.get_tensor_model_parallel_rank()
            called, tensor = f"shared{layer}", whole[f"shared{layer}"]
        else:
            size, rank = self.etp, parallel_state.get_expert_tensor_parallel_rank()
            number = int(name.split("local_experts.")[1].split(".")[0])
            local = self.whole.experts // self.layout.ep
            called, tensor = f"fc{layer}", whole[f"fc{layer}"][parallel_state.get_expert_model_parallel_rank() * local + number]
        if layer == "2":
            return called, tensor.chunk(size, 1)[rank]
        return called, torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])  # gate and up are cut one by one

    @staticmethod
    def loss(case: Case, model: Loop, inputs: Inputs, targets: float | None = None) -> Tensor:
        id_T = inputs["input_ids"].flatten()
        return (model(model.rows[id_T]) * model.wanted[id_T]).sum() / len(id_T)


class _Stream:
    """A CUDA stream of a processor, on which everything happens at once."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> Any:
        return self

    def synchronize(self) -> None:
        pass


def _without_gpu() -> None:
    """Give Megatron what it takes for granted: a GPU's streams, splits that came from it, and TransformerEngine's name."""
    stream = _Stream()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.current_stream = lambda *device: stream  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    moe_utils.te_general_gemm = None

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    dispatchers.maybe_move_tensor_to_cpu = on_host
