"""MoE layers of other projects, with the weights of one of foldray's: on one rank, or with an expert-parallel group of all ranks.

All drop no token. transformers sends the rows that there are. DeepSpeed and Tutel send as many to every expert, as many as the
busiest one of all ranks has, and fill up with zeros. All send with gloo's own all-to-all, and wait for it.

Tutel's overlap (`a2a_ffn_overlap_degree`) needs NCCL: on a processor its layer ignores the degree (`and y.is_cuda` in its
moe_layer.py). So here its pieces travel with gloo, in the order of its overlap.py: all dispatches start, each piece is computed
when it is there, and its combine starts at once; in backward likewise.

Legend: T tokens, H hidden, E experts, e experts of this rank, F inner units, c rows of a piece for an expert.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from foldray.model import Batch, Transformer
from foldray.moe import MoELayer
from foldray.moe.tutel import INSTALL
from trainers.referee.projects import PROJECTS


class Weights(NamedTuple):
    """Weights of a layer: of its router for all experts, with a bias on logits or None, and of the experts of this rank."""

    router_EH: Tensor
    bias_E: Tensor | None
    up_eHF: Tensor  # gate, then value: 2F columns
    down_eFH: Tensor
    topk: int

    @classmethod
    def of(cls, layer: MoELayer) -> Weights:
        router, experts = layer.router, layer.experts
        bias = None if router.logit_bias is None else router.logit_bias.detach().clone()
        return cls(router.weight.detach().t(), bias, experts.up.detach(), experts.down.detach(), router.model.topk)

    @property
    def hidden(self) -> int:
        return self.router_EH.shape[1]

    @property
    def inner(self) -> int:
        return self.down_eFH.shape[1]


Maker = Callable[[Weights], nn.Module]


class Wrapped(nn.Module):
    """A module of another project, with a function that calls it."""

    def __init__(self, module: nn.Module, call: Callable[[Tensor], Tensor]):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class GatedMlp(nn.Module):
    """An expert for DeepSpeed: [T, H] → [T, H], with F inner units."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * value)


def transformers_layer(weights: Weights, implementation: str = "grouped_mm", mesh: Any = None) -> nn.Module:
    """Return Mixtral's layer, spread as `DistributedConfig(ep_size=…, fsdp_size=…)` would spread it, but without FSDP.

    Args:
        mesh: its axes are `ep` and `tp`, the latter with one rank; None if this rank has all experts.
    """
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes: dict[str, Any] = {"hidden_size": weights.hidden, "intermediate_size": weights.inner}
    config = MixtralConfig(**sizes, num_local_experts=len(weights.router_EH), num_experts_per_tok=weights.topk)
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config).train()
    experts: Any = block.experts
    if mesh is not None:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        plan: Any = {name.removeprefix("layers.*.mlp."): style for name, style in config.base_model_ep_plan.items()}
        apply_expert_parallelism(block, mesh["ep"], mesh["tp"], plan, "all_to_all")
    for parameter, own in ((experts.gate_up_proj, weights.up_eHF), (experts.down_proj, weights.down_eFH)):
        (parameter.data if mesh is None else parameter.data.to_local()).copy_(own.transpose(1, 2))
    block.gate.weight.data.copy_(weights.router_EH)
    if weights.bias_E is not None:
        block.gate.bias = nn.Parameter(weights.bias_E)
        block.gate.forward = partial(_mixtral_gate, block.gate)  # type: ignore[method-assign]
    return Wrapped(block, lambda x: block(x.reshape(-1, *x.shape[-2:])).view_as(x))


def _mixtral_gate(gate: Any, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Route as Mixtral's router does, but with a bias on logits, and without making the weight of a single expert 1."""
    logit_TE = functional.linear(x_TH, gate.weight, gate.bias)
    weight_TK, expert_TK = logit_TE.float().softmax(-1).topk(gate.top_k, -1)
    return logit_TE, weight_TK if gate.top_k == 1 else weight_TK / weight_TK.sum(-1, keepdim=True), expert_TK


def deepspeed_layer(weights: Weights) -> nn.Module:
    _tell_environment()
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.sharded_moe import top1gating

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles code meanwhile
    deepspeed.init_distributed("gloo", verbose=False)
    settings: dict[str, Any] = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
    experts, ranks = len(weights.router_EH), len(weights.router_EH) // len(weights.up_eHF)
    layer = MoE(weights.hidden, GatedMlp(weights.hidden, weights.inner), experts, ranks, k=weights.topk, **settings)
    layer.set_deepspeed_parallelism()
    gate: Any = layer.deepspeed_moe.gate
    gate.wg.weight.data.copy_(weights.router_EH)
    if weights.bias_E is not None:
        gate.bias = nn.Parameter(weights.bias_E)
        options: dict[str, Any] = {"drop_tokens": False, "use_rts": False, "ep_group": gate.ep_group}
        gate.forward = lambda x_TH, _, sparse, tutel: top1gating(  # its own has no bias
            functional.linear(x_TH, gate.wg.weight, gate.bias), 1.0, 0, sparse_routes=sparse, use_tutel=tutel, **options
        )
    for expert, up, down in zip(layer.deepspeed_moe.experts.deepspeed_experts, weights.up_eHF, weights.down_eFH, strict=True):
        expert.up.weight.data.copy_(up.t())
        expert.down.weight.data.copy_(down.t())
    return Wrapped(layer, lambda x: layer(x)[0])


def tutel_layer(weights: Weights, degree: int = 1) -> nn.Module:
    """Return Tutel's layer, whose all-to-alls overlap with experts in `degree` pieces."""
    from tutel import moe

    _tell_environment()
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": weights.topk, "capacity_factor": 0.0},  # drops no token
        experts={"type": "llama_ffn", "num_experts_per_device": len(weights.up_eHF), "hidden_size_per_expert": weights.inner},
        model_dim=weights.hidden,
        a2a_ffn_overlap_degree=degree,
        **({"parallel_type": "adaptive:0"} if degree > 1 else {}),  # without all-to-alls of its own
    )
    (gate,) = layer.gates
    if weights.bias_E is not None:
        gate.wg = nn.Linear(weights.hidden, len(weights.router_EH))
        gate.wg.bias.data.copy_(weights.bias_E)
    gate.wg.weight.data.copy_(weights.router_EH)
    values = *weights.up_eHF.chunk(2, -1), weights.down_eFH
    for name, value in zip(("W_fc1", "W_fc2", "W_fc3"), values, strict=True):
        getattr(layer.experts, name).data.copy_(value.reshape(-1))
    if degree > 1:
        layer.expert_local = partial(_in_pieces, layer, layer.expert_local, degree)
    return Wrapped(layer, layer)


class _Flight:
    """A piece that travels between all ranks in equal shares: forward, and later its gradient."""

    def start(self, x: Tensor) -> Tensor:
        self.sent, self.out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        self.work = dist.all_to_all_single(self.out, self.sent, async_op=True)
        return self.out

    def wait(self) -> None:
        self.work.wait()
        del self.sent, self.out


class _Leave(torch.autograd.Function):
    """Starts a flight: its data may not have arrived. Backward waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.start(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        ctx.flight.wait()
        return gradient[0], None


class _Arrive(torch.autograd.Function):
    """Waits for a flight. Backward starts that of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.start(gradient[0]), None


def _in_pieces(layer: Any, experts: Callable[..., Tensor], degree: int, y_EcH: Tensor, shape: torch.Size) -> Tensor:
    """Run experts as Tutel's `a2a_ffn_overlap_forward` does. Autograd runs what was made last first, so backward mirrors it."""
    from tutel.impls.communicate import post_expert_permute, pre_expert_permute

    out, back = ([_Flight() for _ in range(degree)] for _ in range(2))
    left = [_Leave.apply(piece, flight) for piece, flight in zip(y_EcH.chunk(degree, 1), out, strict=True)]
    returned = []
    for piece, flight, other in zip(left, out, back, strict=True):
        here = pre_expert_permute(_Arrive.apply(piece, flight), group=layer.group)
        returned.append(_Leave.apply(post_expert_permute(experts(here, shape), group=layer.group), other))
    return torch.cat([_Arrive.apply(piece, flight) for piece, flight in zip(returned, back, strict=True)], 1)


def _tell_environment() -> None:
    """Tell DeepSpeed and Tutel of the device, and of the process group that there is."""
    os.environ |= {
        "RANK": f"{dist.get_rank()}", "LOCAL_RANK": "0", "WORLD_SIZE": f"{dist.get_world_size()}", "LOCAL_SIZE": "1",
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip


def _spread_transformers() -> Maker:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))  # one for all layers
    return partial(transformers_layer, mesh=mesh)


PEERS: Mapping[str, Callable[[], Maker]] = {
    "deepspeed": lambda: deepspeed_layer,
    "transformers": _spread_transformers,
    **{f"tutel:{degree}": partial(partial, tutel_layer, degree=degree) for degree in (1, 2, 4)},
}
"""What makes layers over all ranks, by the name that `overlap.py --peers` takes. The first layer raises ImportError where the
project is not installed.
"""


REMARK = """deepspeed and tutel drop no token, but fill every expert up to the rows of the busiest one;
Tutel's overlap needs NCCL, so its pieces (tutel:2, tutel:4) travel with gloo here, in the order of its code"""


def missing(names: Iterable[str]) -> dict[str, str]:
    """Return the commands that install these projects, by project."""
    projects = {name.partition(":")[0] for name in names}
    return {name: f"pip install {PROJECTS[name].install}" if name in PROJECTS else INSTALL for name in sorted(projects)}


class Stack(nn.Module):
    """foldray's model with another project's MoE layers of the same weights. Embedding, norms, attention and head are shared."""

    def __init__(self, model: Transformer, make: Maker):
        super().__init__()
        self.model = model
        self.moes = nn.ModuleDict({str(layer): make(Weights.of(moe)) for layer, moe in model.moe_layers()})

    def hidden(self, batch: Batch) -> Tensor:
        """Return the output of the last block: [B, L, H]."""
        (place,) = self.model.places(batch)
        x_BLH = self.model.embed(batch, place)
        for layer in range(self.model.spec.layers):
            block = self.model.block(layer)
            x_BLH = block.attend(x_BLH, place)
            x_BLH = x_BLH + self.moes[str(layer)](block.routed(x_BLH)) if block.is_moe else block.feed(x_BLH)
        return x_BLH

    def forward(self, batch: Batch) -> Tensor:
        """Return the language loss, a mean."""
        hidden_BLH = self.hidden(batch)
        return self.model.head_loss(hidden_BLH, batch, range(hidden_BLH.shape[1]))[0] / batch.target_BL.numel()
