"""A training step of a recipe in plain torch, written from the model's definition. It shares no code with foldray's model.

Sequences go through the model one by one, tokens go through experts one by one, and autograd computes the gradients. Weights
are a dict by global name. L tokens of a sequence, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foldray.recipe import Recipe

Weights = dict[str, Tensor]


class Router(NamedTuple):
    """The balance loss and z-loss of a sequence in a MoE block, and how many of its tokens chose each expert."""

    balance: Tensor
    z: Tensor
    count_E: Tensor


class Plain:
    """A model and its optimizer, in one process."""

    def __init__(self, recipe: Recipe, weights: Weights):
        self.recipe, self.model = recipe, recipe.model
        self.weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        self.biases = {layer: torch.zeros(self.model.experts, dtype=torch.float64) for layer in self.model.moe_layers}
        spec, matrices = recipe.optimizer, [weight for weight in self.weights.values() if weight.dim() > 1]
        vectors = [weight for weight in self.weights.values() if weight.dim() == 1]
        groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        if spec.kind == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)

    def step(self, token_BL: Tensor, target_BL: Tensor, segment_BL: Tensor | None) -> dict[str, Any]:
        """Update the weights on these sequences. Return the mean losses, and the gradient's norm before clipping."""
        model, sequences = self.model, len(token_BL)
        counted = (target_BL >= 0).sum()
        language = torch.zeros((), dtype=torch.float64)
        routers: dict[int, list[Router]] = {layer: [] for layer in model.moe_layers}
        for number in range(sequences):
            segment_L = None if segment_BL is None else segment_BL[number]
            logits_LV = self._logits(token_BL[number], segment_L, routers)
            language = language + F.cross_entropy(logits_LV, target_BL[number], ignore_index=-100, reduction="sum")
        balance = sum(router.balance for rows in routers.values() for router in rows)
        z = sum(router.z for rows in routers.values() for router in rows)
        objective = language / counted + (model.router.balance_loss * balance + model.router.z_loss * z) / sequences
        self.optimizer.zero_grad()
        objective.backward()
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        norm = torch.cat([weight.grad.flatten() for weight in self.weights.values() if weight.grad is not None]).norm()
        if self.recipe.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.weights.values(), self.recipe.optimizer.clip)
        self.optimizer.step()
        for layer, rows in routers.items():
            count_E = torch.stack([router.count_E for router in rows]).sum(0)
            self.biases[layer] += model.router.bias_rate * torch.sign(count_E.mean() - count_E)
        blocks = max(1, len(routers))
        means = [language / counted, balance / sequences / blocks, z / sequences / blocks]
        return {"losses": [float(torch.as_tensor(mean).detach()) for mean in means], "norm": float(norm)}

    def _logits(self, token_L: Tensor, segment_L: Tensor | None, routers: dict[int, list[Router]]) -> Tensor:
        x_LH = self.weights["embedding.weight"][token_L]
        if self.model.positions == "learned":
            x_LH = x_LH + self.weights["positions.weight"][: len(token_L)]
        for layer in range(self.model.layers):
            name = f"blocks.{layer}"
            x_LH = x_LH + self._attention(name, layer, self._norm(f"{name}.attention_norm", x_LH), segment_L)
            h_LH = self._norm(f"{name}.ffn_norm", x_LH)
            if layer in routers:
                y_LH, router = self._mixture(name, layer, h_LH)
                routers[layer].append(router)
                x_LH = x_LH + y_LH
            else:
                x_LH = x_LH + self._feed_forward(f"{name}.ffn", h_LH)
        head = "embedding.weight" if self.model.tied_embeddings else "head.weight"
        return self._norm("final_norm", x_LH) @ self.weights[head].T

    def _norm(self, name: str, x_LH: Tensor) -> Tensor:
        weight_H = self.weights[f"{name}.weight"]
        if self.model.norm == "rmsnorm":
            return x_LH / torch.sqrt(x_LH.square().mean(-1, keepdim=True) + self.model.norm_eps) * weight_H
        centred_LH = x_LH - x_LH.mean(-1, keepdim=True)
        scale_L1 = torch.sqrt(centred_LH.square().mean(-1, keepdim=True) + self.model.norm_eps)
        return centred_LH / scale_L1 * weight_H + self.weights[f"{name}.bias"]

    def _attention(self, name: str, layer: int, x_LH: Tensor, segment_L: Tensor | None) -> Tensor:
        model, length = self.model, len(x_LH)
        group, outs = model.heads // model.kv_heads, []
        key_dim, value_dim = model.head_dim, model.value_dim or model.head_dim
        query_LN, key_LN, value_LN = (self._headed(name, part, x_LH) for part in ("query", "key", "value"))
        seen_LL = self._seen(length, layer, segment_L)
        for head in range(model.heads):
            shared = head // group
            q = self._turned(query_LN[:, head * key_dim : (head + 1) * key_dim])
            k = self._turned(key_LN[:, shared * key_dim : (shared + 1) * key_dim])
            v = value_LN[:, shared * value_dim : (shared + 1) * value_dim]
            score_LL = (q @ k.T / math.sqrt(key_dim)).masked_fill(~seen_LL, -math.inf)
            outs.append(score_LL.softmax(-1) @ v)
        y_LH = torch.cat(outs, dim=1) @ self.weights[f"{name}.attention.out"]
        return y_LH + self.weights[f"{name}.attention.out_bias"] if model.attention_bias == "all" else y_LH

    def _headed(self, name: str, part: str, x_LH: Tensor) -> Tensor:
        """Return queries, keys or values of all heads, side by side, with their bias and norm."""
        y_LN = x_LH @ self.weights[f"{name}.attention.{part}"]
        if self.model.attention_bias != "none":
            y_LN = y_LN + self.weights[f"{name}.attention.{part}_bias"]
        if self.model.qk_norm == "none" or part == "value":
            return y_LN
        weight, width = self.weights[f"{name}.attention.norm.{part}"], self.model.head_dim
        pieces = y_LN.split(y_LN.shape[1] if self.model.qk_norm == "all" else width, dim=1)
        return torch.cat([x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.model.norm_eps) * weight for x in pieces], 1)

    def _seen(self, length: int, layer: int, segment_L: Tensor | None) -> Tensor:
        kind, _, size = self.model.windows[layer % len(self.model.windows)].partition(":")
        rows = []
        for query in range(length):
            first = {"full": 0, "sliding": query + 1 - int(size or 0), "chunked": query - query % int(size or 1)}[kind]
            together = [segment_L is None or bool(segment_L[key] == segment_L[query]) for key in range(length)]
            rows.append([first <= key <= query and together[key] for key in range(length)])
        return torch.tensor(rows)

    def _turned(self, x_LD: Tensor) -> Tensor:
        """Apply rotary positions: rotate pairs of columns as complex numbers."""
        if self.model.positions != "rope":
            return x_LD
        half, columns = (self.model.rope_dim or x_LD.shape[1]) // 2, list(x_LD.unbind(1))
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if self.model.rope_pairs == "interleaved" else (i, i + half)
            angle = torch.arange(len(x_LD), dtype=torch.float64) * self.model.rope_theta ** (-i / half)
            turned = torch.complex(x_LD[:, a], x_LD[:, b]) * torch.polar(torch.ones_like(angle), angle)
            columns[a], columns[b] = turned.real, turned.imag
        return torch.stack(columns, dim=1)

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        if self.model.ffn == "gelu":
            inner = x @ self.weights[f"{name}.up"]
            return (inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))) @ self.weights[f"{name}.down"]
        gate = x @ self.weights[f"{name}.gate"]
        return (gate * torch.sigmoid(gate) * (x @ self.weights[f"{name}.up"])) @ self.weights[f"{name}.down"]

    def _mixture(self, name: str, layer: int, h_LH: Tensor) -> tuple[Tensor, Router]:
        spec, (length, _), topk, experts = self.model.router, h_LH.shape, self.model.topk, self.model.experts
        logits_LE = h_LH @ self.weights[f"{name}.moe.router.weight"]
        score_LE = torch.sigmoid(logits_LE) if spec.score == "sigmoid" else logits_LE.softmax(-1)
        biased_LE = score_LE.detach() + self.biases[layer]
        kept = self._kept(biased_LE, score_LE.detach(), logits_LE.detach())
        rows, count_E = [], torch.zeros(experts, dtype=torch.float64)
        for token in range(length):
            chosen = biased_LE[token].argsort(descending=True)[:topk]
            count_E[chosen] += 1
            if spec.score == "softmax" and spec.softmax == "after_topk":
                weight_K = logits_LE[token, chosen].softmax(-1)
            else:
                weight_K = score_LE[token, chosen]
                weight_K = weight_K / weight_K.sum() if spec.normalize else weight_K
            parts = [
                weight * spec.scale * self._feed_forward(f"{name}.moe.experts.{int(expert)}", h_LH[token])
                for expert, weight in zip(chosen, weight_K, strict=True) if kept is None or (token, int(expert)) in kept
            ]  # fmt: skip
            shared = [self._feed_forward(f"{name}.moe.shared", h_LH[token])] if self.model.shared_hidden else []
            if self.model.shared_gate:
                shared[0] = shared[0] * torch.sigmoid(h_LH[token] @ self.weights[f"{name}.moe.shared.output_gate"])
            rows.append(sum([*parts, *shared], start=torch.zeros_like(h_LH[token])))
        probability_LE = score_LE / score_LE.sum(-1, keepdim=True)
        balance = experts * (count_E / count_E.sum() * probability_LE.mean(0)).sum()
        z = logits_LE.logsumexp(-1).square().mean()
        return torch.stack(rows), Router(balance, z, count_E)

    def _kept(self, biased_LE: Tensor, score_LE: Tensor, logits_LE: Tensor) -> set[tuple[int, int]] | None:
        """Return the (token, expert) pairs within the capacity of a whole sequence; None if nothing is dropped."""
        spec, topk, (length, experts) = self.model.router, self.model.topk, score_LE.shape
        if spec.capacity_factor is None:
            return None
        capacity, kept = min(length, math.ceil(spec.capacity_factor * length * topk / experts)), set()
        weighed: dict[int, list[tuple[float, int]]] = {expert: [] for expert in range(experts)}
        for token in range(length):
            chosen = biased_LE[token].argsort(descending=True)[:topk]
            after = spec.score == "softmax" and spec.softmax == "after_topk"
            weight_K = logits_LE[token, chosen].softmax(-1) if after else score_LE[token, chosen]
            weight_K = weight_K / weight_K.sum() if spec.normalize else weight_K
            for expert, weight in zip(chosen.tolist(), weight_K.tolist(), strict=True):
                weighed[expert].append((weight, token))
        for expert, rows in weighed.items():
            ordered = sorted(rows, key=lambda row: (-row[0], row[1])) if spec.drop == "probability" else rows
            kept |= {(token, expert) for _, token in ordered[:capacity]}
        return kept
