"""A training step of a recipe in plain torch, written from the model's definition. It shares no code with foldray's model.

Sequences go through the model one by one, tokens go through experts one by one, and autograd computes the gradients. Weights
are a dict by global name. L tokens of a sequence, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from foldray.blueprint import RopeScaling
from foldray.recipe import Recipe

Weights = dict[str, Tensor]


def is_hidden(name: str, weight: Tensor) -> bool:
    """Whether Muon updates a weight."""
    return weight.dim() == 2 and not name.startswith(("embedding.", "positions.", "head.")) and not name.endswith("_filter")


def turned(weight: Tensor) -> Tensor:
    """Return a weight [in, out] as torch's layers have it, [out, in], in the same memory."""
    return weight.detach().T.requires_grad_()


def wide_iteration() -> AbstractContextManager:
    """Let `torch.optim.Muon` iterate in the dtype of the weights instead of bfloat16, and change nothing else of it."""
    return patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)


class Router(NamedTuple):
    """Mean scores of a sequence in a MoE block, its z-loss, how many of its tokens chose each expert, and how far each score was
    from the next one after those that were chosen."""

    probability_E: Tensor
    z: Tensor
    count_E: Tensor
    margin_LE: Tensor


def balanced(margins: list[list[float]], bias_E: list[float], topk: int, bins: int = 1000) -> list[float]:
    """Return the bias of each expert that as many of its margins as an even use asks for do not exceed, by bins, less the mean.

    Args:
        margins: how far each expert's score was from being chosen, for every token.
    """
    low = min(bias_E) - 1
    width, experts, found = (max(bias_E) + 1 - low) / bins, len(bias_E), []
    for expert in range(experts):
        counted = Counter(int((margin_E[expert] - low) / width) for margin_E in margins)
        left = len(margins) * topk / experts
        for place in sorted(counted):
            if left <= counted[place]:
                found.append(low + (place + left / counted[place]) * width)
                break
            left -= counted[place]
    return [each - sum(found) / experts for each in found]


class Plain:
    """A model and its optimizer, in one process."""

    def __init__(self, recipe: Recipe, weights: Weights):
        self.recipe, self.model = recipe, recipe.model
        self.weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        self.biases = {layer: torch.zeros(self.model.experts, dtype=torch.float64) for layer in self.model.moe_layers}
        self.given: dict[int, list[list[int]]] = {}  # experts of a sequence's tokens by block; −1 leaves a token to the router
        self.counts = {layer: torch.ones_like(bias) for layer, bias in self.biases.items()}  # of the last step
        spec, weights = recipe.optimizer, self.weights
        self.turned = {
            name: turned(weight) for name, weight in weights.items() if spec.kind == "muon" and is_hidden(name, weight)
        }
        matrices = [weight for name, weight in weights.items() if weight.dim() > 1 and name not in self.turned]
        vectors = [weight for weight in weights.values() if weight.dim() == 1]
        groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        if spec.kind == "sgd":
            self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum)]
        else:
            self.optimizers = [torch.optim.AdamW(groups, lr=spec.adamw_lr or spec.lr, betas=spec.betas, eps=spec.eps)]
        if self.turned:
            keys: dict[str, Any] = {"momentum": spec.momentum, "nesterov": spec.nesterov, "ns_steps": spec.ns_steps}
            keys |= {"weight_decay": spec.weight_decay, "adjust_lr_fn": spec.adjust_lr}
            self.optimizers.append(torch.optim.Muon(list(self.turned.values()), lr=spec.lr, **keys))

    def step(
        self,
        token_BL: Tensor,
        target_BL: Tensor,
        segment_BL: Tensor | None,
        expert_MBLK: Tensor | None = None,
        weight_BL: Tensor | None = None,
    ) -> dict[str, Any]:
        """Update the weights on these sequences. Return the mean losses, and the gradient's norm before clipping.

        They come in the order of the numbers of their micro-batches. Experts and weights are those of `Batch`.
        """
        model, sequences = self.model, len(token_BL)
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(model.mtp_depth + 1)]
        counts = [0] * len(sums)
        routers: dict[int, list[Router]] = {layer: [] for layer in model.moe_layers}
        for number in range(sequences):
            segment_L = None if segment_BL is None else segment_BL[number]
            self.given = {} if expert_MBLK is None else dict(zip(model.moe_layers, expert_MBLK[:, number].tolist(), strict=True))
            weight_L = [1.0] * len(token_BL[number]) if weight_BL is None else weight_BL[number].tolist()
            for depth, logits_LV in enumerate(self._logits(token_BL[number], segment_L, routers)):
                # Position i predicts target i + depth, which the last positions of a document have not.
                for i, (logits_V, target) in enumerate(zip(logits_LV, target_BL[number].tolist()[depth:], strict=False)):
                    if target != -100 and (segment_L is None or segment_L[i] == segment_L[i + depth]):
                        sums[depth] = sums[depth] + weight_L[i + depth] * (logits_V.logsumexp(0) - logits_V[target])
                        counts[depth] += 1
        language, *further = [total / max(1, count) for total, count in zip(sums, counts, strict=True)]
        balance = sum(self._balance(layer, rows) for layer, rows in routers.items())
        z = sum(router.z for rows in routers.values() for router in rows)
        objective = language + (model.router.balance_loss * balance + model.router.z_loss * z) / sequences
        for loss in further:
            objective = objective + model.mtp_weight / len(further) * loss
        for weight in self.weights.values():
            weight.grad = None
        objective.backward()
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        norm = torch.cat([weight.grad.flatten() for weight in self.weights.values() if weight.grad is not None]).norm()
        if self.recipe.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.weights.values(), self.recipe.optimizer.clip)
        for name, each in self.turned.items():
            each.grad = self.weights[name].grad.T  # type: ignore[union-attr]
        with wide_iteration():
            for optimizer in self.optimizers:
                optimizer.step()
        for layer, rows in routers.items():
            self.counts[layer] = count_E = torch.stack([router.count_E for router in rows]).sum(0)
            if model.router.bias_update == "quantile":
                margin_TE = torch.cat([router.margin_LE for router in rows])
                wanted_E = torch.tensor(
                    balanced(margin_TE.tolist(), self.biases[layer].tolist(), model.topk), dtype=torch.float64
                )
                self.biases[layer] += model.router.bias_rate * (wanted_E - self.biases[layer])
                continue
            lacks_E = count_E.mean() - count_E
            moves_E = lacks_E / count_E.mean() if model.router.bias_update == "proportional" else torch.sign(lacks_E)
            moves_E = moves_E - moves_E.mean() if model.router.bias_update == "centered" else moves_E
            self.biases[layer] += model.router.bias_rate * moves_E
        blocks = max(1, len(routers))
        means = [language, balance / sequences / blocks, z / sequences / blocks]
        means += [sum(further) / len(further)] if further else []
        return {"losses": [float(torch.as_tensor(mean).detach()) for mean in means], "norm": float(norm)}

    def _balance(self, layer: int, rows: list[Router]) -> Tensor:
        """Return the balance losses of all sequences, summed."""
        scope, experts, total = self.model.router.balance_scope, self.model.experts, torch.zeros((), dtype=torch.float64)
        together = self.recipe.placed_fold.dp * self.recipe.training.micro_batch
        for number, router in enumerate(rows):
            counted = {"sequence": [router], "batch": rows[number // together * together :][:together]}
            count_E = sum(each.count_E for each in counted[scope]) if scope in counted else self.counts[layer]
            total = total + experts * sum(
                float(count) / float(count_E.sum()) * probability
                for count, probability in zip(count_E, router.probability_E, strict=True)
            )
        return total

    def _logits(self, token_L: Tensor, segment_L: Tensor | None, routers: dict[int, list[Router]]) -> list[Tensor]:
        """Return the logits of the next token and of each further one."""
        x_LH = self.weights["embedding.weight"][token_L] * self.model.embedding_scale
        if self.model.positions == "learned":
            x_LH = x_LH + self.weights["positions.weight"][[i - self._start(i, segment_L) for i in range(len(token_L))]]
        for layer in range(self.model.layers):
            x_LH = self._block(layer, layer, x_LH, segment_L, routers)
        head = "embedding.weight" if self.model.tied_embeddings else "head.weight"
        x_LH = self._norm("final_norm", x_LH)
        logits = [x_LH @ self.weights[head].T * self.model.logit_scale]
        for depth in range(1, self.model.mtp_depth + 1):
            layer = self.model.layers + depth - 1
            name = f"blocks.{layer}.mtp"
            later_L = torch.cat([token_L[depth:], token_L[-1:].expand(min(depth, len(token_L)))])[: len(token_L)]
            e_LH = self._norm(f"{name}.embedding_norm", self.weights["embedding.weight"][later_L] * self.model.embedding_scale)
            both_LI = torch.cat([e_LH, self._norm(f"{name}.hidden_norm", x_LH)], dim=1)
            x_LH = self._block(layer, self.model.layers - 1, both_LI @ self.weights[f"{name}.projection"], segment_L, routers)
            x_LH = self._norm(f"{name}.final_norm", x_LH)
            logits.append(x_LH @ self.weights[head].T * self.model.logit_scale)
        return logits

    def _block(self, layer: int, like: int, x_LH: Tensor, segment_L: Tensor | None, routers: dict[int, list[Router]]) -> Tensor:
        """Return the output of a block that has the window of block `like`."""
        name = f"blocks.{layer}"
        y_LH = self._attention(name, like, self._norm(f"{name}.attention_norm", x_LH), segment_L)
        x_LH = x_LH + self._norm(f"{name}.attention_after", y_LH * self.model.residual_scale)
        h_LH = self._norm(f"{name}.ffn_norm", x_LH)
        if layer not in routers:
            y_LH = self._feed_forward(f"{name}.ffn", h_LH)
        else:
            y_LH, router = self._mixture(name, layer, h_LH)
            routers[layer].append(router)
        return x_LH + self._norm(f"{name}.ffn_after", y_LH * self.model.residual_scale)

    def _norm(self, name: str, x_LH: Tensor) -> Tensor:
        if f"{name}.weight" not in self.weights:  # the model has no norm there
            return x_LH
        weight_H = self.weights[f"{name}.weight"]
        if self.model.norm != "layernorm":
            factor_H = weight_H + 1 if self.model.norm == "zero_rmsnorm" else weight_H
            return x_LH / torch.sqrt(x_LH.square().mean(-1, keepdim=True) + self.model.norm_eps) * factor_H
        centred_LH = x_LH - x_LH.mean(-1, keepdim=True)
        scale_L1 = torch.sqrt(centred_LH.square().mean(-1, keepdim=True) + self.model.norm_eps)
        return centred_LH / scale_L1 * weight_H + self.weights[f"{name}.bias"]

    def _attention(self, name: str, layer: int, x_LH: Tensor, segment_L: Tensor | None) -> Tensor:
        model, length = self.model, len(x_LH)
        if model.windows[layer % len(model.windows)] == "linear":
            return self._linear(name, x_LH, segment_L)
        group, outs = model.heads // model.kv_heads, []
        key_dim, value_dim = model.head_dim, model.value_dim or model.head_dim
        if model.latent_rank:
            query_LN, key_LN, value_LN = self._latent(name, x_LH)
            group = 1
        else:
            query_LN, key_LN, value_LN = (self._headed(name, part, x_LH) for part in ("query", "key", "value"))
        seen_LL, window = self._seen(length, layer, segment_L), model.windows[layer % len(model.windows)]
        within_L = [i - self._start(i, segment_L) for i in range(length)]
        factors = [1 + model.query_growth * math.log(1 + i // model.query_growth_positions) for i in within_L]
        for head in range(model.heads):
            shared = head // group
            q = self._turned(query_LN[:, head * key_dim : (head + 1) * key_dim], window)
            k = self._turned(key_LN[:, shared * key_dim : (shared + 1) * key_dim], window)
            v = value_LN[:, shared * value_dim : (shared + 1) * value_dim]
            if model.qk_norm == "turned_head":
                q, k = self._normed_heads(name, "query", q), self._normed_heads(name, "key", k)
            q = q * torch.tensor(factors, dtype=torch.float64)[:, None]
            score_LL = (q @ k.T * self._scale(window)).masked_fill(~seen_LL, -math.inf)
            if model.attention_sinks:
                sink = self.weights[f"{name}.attention.sinks"][head].expand(length, 1)
                outs.append(torch.cat((score_LL, sink), dim=1).softmax(-1)[:, :-1] @ v)
            else:
                outs.append(score_LL.softmax(-1) @ v)
        if model.attention_gate != "none":
            gate_LN = torch.sigmoid(x_LH @ self.weights[f"{name}.attention.gate"])
            outs = [out * gate for out, gate in zip(outs, gate_LN.chunk(model.heads, dim=1), strict=True)]
        y_LH = torch.cat(outs, dim=1) @ self.weights[f"{name}.attention.out"]
        return y_LH + self.weights[f"{name}.attention.out_bias"] if model.attention_bias == "all" else y_LH

    def _linear(self, name: str, x_LH: Tensor, segment_L: Tensor | None) -> Tensor:
        """Compute the gated delta rule token by token, head by head (arXiv:2412.06464, equation 10).

        In Kimi Delta Attention (arXiv:2510.26692, equations 1 and 10), each row of the state decays by itself.
        """
        model, own = self.model, {part: self.weights.get(f"{name}.attention.{part}") for part in (
            "query", "key", "value", "gate", "write", "decay", "out", "query_filter", "key_filter", "value_filter", "decay_rate",
            "time_step", "norm.output", "gate_down", "decay_down")}  # fmt: skip
        kimi = model.linear_kind == "kimi_delta"
        gate_LN = (x_LH @ own["gate_down"] if kimi else x_LH) @ own["gate"]
        decay_LN = (x_LH @ own["decay_down"] if kimi else x_LH) @ own["decay"]
        step_LN = torch.log1p(torch.exp(decay_LN + own["time_step"]))
        heads = model.linear_heads or model.heads
        group, width = heads // (model.linear_key_heads or heads), model.linear_key_dim or model.head_dim
        value_dim, mixed = model.linear_value_dim or width, {}
        for part in ("query", "key", "value"):
            made_LN, filters = x_LH @ own[part], own[f"{part}_filter"]
            rows = []
            for i in range(len(x_LH)):
                seen = range(max(self._start(i, segment_L), i + 1 - model.linear_taps), i + 1)
                row = sum(made_LN[j] * filters[model.linear_taps - 1 - (i - j)] for j in seen)
                rows.append(row * torch.sigmoid(row))
            mixed[part] = torch.stack(rows)
        outs = []
        for head in range(heads):
            shared, own_values = head // group, slice(head * value_dim, (head + 1) * value_dim)
            state_DE, rows = torch.zeros(width, value_dim, dtype=torch.float64), []
            for i in range(len(x_LH)):
                q, k = (mixed[part][i, shared * width : (shared + 1) * width] for part in ("query", "key"))
                q, k = (x / torch.sqrt((x * x).sum() + 1e-6) for x in (q, k))
                step_D = step_LN[i, head * width : (head + 1) * width] if kimi else step_LN[i, head].expand(width)
                keeps_D = torch.exp(-torch.exp(own["decay_rate"][head]) * step_D)
                state_DE = torch.diag(keeps_D) @ state_DE if self._start(i, segment_L) < i else torch.zeros_like(state_DE)
                writes = torch.sigmoid(x_LH[i] @ own["write"][:, head])
                state_DE = state_DE + torch.outer(k, writes * (mixed["value"][i, own_values] - k @ state_DE))
                read = self._unit(q @ state_DE / math.sqrt(width)) * own["norm.output"]
                gate = gate_LN[i, own_values]
                rows.append(read * torch.sigmoid(gate) * (1.0 if kimi else gate))
            outs.append(torch.stack(rows))
        return torch.cat(outs, dim=1) @ own["out"]

    def _headed(self, name: str, part: str, x_LH: Tensor) -> Tensor:
        """Return queries, keys or values of all heads, side by side, with their bias and norm."""
        y_LN = x_LH @ self.weights[f"{name}.attention.{part}"]
        if self.model.attention_bias != "none":
            y_LN = y_LN + self.weights[f"{name}.attention.{part}_bias"]
        if self.model.qk_norm not in ("head", "all") or part == "value":
            return y_LN
        return self._normed_heads(name, part, y_LN)

    def _normed_heads(self, name: str, part: str, y_LN: Tensor) -> Tensor:
        weight, width = self.weights[f"{name}.attention.norm.{part}"], self.model.head_dim
        weight = weight + 1 if self.model.norm == "zero_rmsnorm" else weight
        pieces = y_LN.split(y_LN.shape[1] if self.model.qk_norm == "all" else width, dim=1)
        return torch.cat([self._unit(x) * weight for x in pieces], dim=1)

    def _seen(self, length: int, layer: int, segment_L: Tensor | None) -> Tensor:
        kind, _, size = self.model.windows[layer % len(self.model.windows)].partition(":")
        rows = []
        for query in range(length):
            within = query - self._start(query, segment_L)
            first = {"full": 0, "sliding": query + 1 - int(size or 0), "chunked": query - within % int(size or 1)}[kind]
            together = [segment_L is None or bool(segment_L[key] == segment_L[query]) for key in range(length)]
            rows.append([first <= key <= query and together[key] for key in range(length)])
        return torch.tensor(rows)

    @staticmethod
    def _start(i: int, segment_L: Tensor | None) -> int:
        """Return the position at which a token's document begins."""
        return 0 if segment_L is None else segment_L.tolist().index(int(segment_L[i]))

    def _turned(self, x_LD: Tensor, window: str) -> Tensor:
        """Apply rotary positions: rotate pairs of columns as complex numbers."""
        if self.model.positions != "rope" or (window == "full" and self.model.full_positions == "none"):
            return x_LD
        half, columns = (self.model.rope_dim or x_LD.shape[1]) // 2, list(x_LD.unbind(1))
        first, scaling = x_LD.shape[1] - 2 * half if self.model.latent_rank else 0, self._scaling(window)
        theta = self.model.rope_theta if window == "full" else self.model.window_rope_theta or self.model.rope_theta
        place = torch.arange(len(x_LD), dtype=torch.float64)
        length = torch.ones_like(place)
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if self.model.rope_pairs == "interleaved" else (i, i + half)
            rate = theta ** (-i / half)
            if scaling:
                rate = rate / scaling.factor + (rate - rate / scaling.factor) * self._unstretched(i, half)
                length = torch.full_like(length, 0.1 * math.log(scaling.factor) + 1)
                if scaling.mscale_all_dim:
                    length = torch.ones_like(length)
            turned = torch.complex(x_LD[:, first + a], x_LD[:, first + b]) * torch.polar(length, place * rate)
            columns[first + a], columns[first + b] = turned.real, turned.imag
        return torch.stack(columns, dim=1)

    def _unstretched(self, pair: int, pairs: int) -> float:
        """Return how much of its own rate a pair keeps (YaRN): 1 if it turns often, 0 if it turns seldom."""
        scaling, log = self.model.rope_scaling, math.log(self.model.rope_theta)
        assert scaling is not None
        often, seldom = (pairs * math.log(scaling.original_positions / (turns * 2 * math.pi)) / log for turns in (
            scaling.beta_fast, scaling.beta_slow))  # fmt: skip
        often, seldom = max(math.floor(often), 0), min(math.ceil(seldom), 2 * pairs - 1)
        return 1 - min(1.0, max(0.0, (pair - often) / (seldom - often or 1e-3)))

    def _scaling(self, window: str) -> RopeScaling | None:
        """Return how the rotary positions of blocks with a window are scaled."""
        model = self.model
        own = model.full_positions == "none" if window == "full" else model.window_rope_theta is not None
        return None if own else model.rope_scaling

    def _scale(self, window: str) -> float:
        """Return the factor on scores, with DeepSeek's own."""
        scaling, scale = self._scaling(window), self.model.attention_scale or 1 / math.sqrt(self.model.head_dim)
        return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2 if (
            scaling and scaling.mscale_all_dim) else scale  # fmt: skip

    def _latent(self, name: str, x_LH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of all heads, side by side, of latent attention."""
        model, own = self.model, {part: self.weights.get(f"{name}.attention.{part}") for part in (
            "query", "query_down", "key_value", "key_value_down", "norm.query", "norm.key_value")}  # fmt: skip
        rank, turning, value = model.latent_rank, model.rope_dim or 0, model.value_dim or model.head_dim
        narrow_LR = x_LH
        if model.latent_query_rank:
            narrow_LR = self._unit(x_LH @ own["query_down"], model.latent_norm_eps) * own["norm.query"]
        query_LN = narrow_LR @ own["query"]
        down_LR = x_LH @ own["key_value_down"]
        made_LN = (self._unit(down_LR[:, :rank], model.latent_norm_eps) * own["norm.key_value"]) @ own["key_value"]
        keys, values = [], []
        for head_LW in made_LN.chunk(model.heads, dim=1):
            keys += [head_LW[:, : model.head_dim - turning], down_LR[:, rank:]]
            values.append(head_LW[:, model.head_dim - turning :])
        assert values[0].shape[1] == value
        return query_LN, torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def _unit(self, x: Tensor, eps: float | None = None) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + (eps or self.model.norm_eps))

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        if self.model.ffn == "gelu":
            inner = x @ self.weights[f"{name}.up"] + self.weights.get(f"{name}.up_bias", torch.zeros(()))
            inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
            return inner @ self.weights[f"{name}.down"] + self.weights.get(f"{name}.down_bias", torch.zeros(()))
        gate = x @ self.weights[f"{name}.gate"]
        if self.model.ffn == "gated_clamped" or f"{name}.gate_bias" in self.weights:
            return self._biased_feed_forward(name, x)
        return (gate * torch.sigmoid(gate) * (x @ self.weights[f"{name}.up"])) @ self.weights[f"{name}.down"]

    def _biased_feed_forward(self, name: str, x: Tensor) -> Tensor:
        """Compute a gated network that may have biases, and GPT-OSS's activation."""
        gate, up = (x @ self.weights[f"{name}.{part}"] for part in ("gate", "up"))
        if f"{name}.gate_bias" in self.weights:
            gate, up = gate + self.weights[f"{name}.gate_bias"], up + self.weights[f"{name}.up_bias"]
        if self.model.ffn == "gated_clamped":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            inner = gate * torch.sigmoid(gate) * up
        return inner @ self.weights[f"{name}.down"] + self.weights.get(f"{name}.down_bias", torch.zeros(()))

    def _mixture(self, name: str, layer: int, h_LH: Tensor) -> tuple[Tensor, Router]:
        spec, (length, _), topk, experts = self.model.router, h_LH.shape, self.model.topk, self.model.experts
        logits_LE = h_LH @ self.weights[f"{name}.moe.router.weight"]
        if spec.logit_bias:
            logits_LE = logits_LE + self.weights[f"{name}.moe.router.logit_bias"]
        score_LE = torch.sigmoid(logits_LE) if spec.score == "sigmoid" else logits_LE.softmax(-1)
        biased_LE = self._in_best_groups(score_LE.detach() + self.biases[layer])
        given_LK = torch.tensor(self.given[layer]) if layer in self.given else torch.full((length, topk), -1)
        chosen_LK = given_LK.where(given_LK >= 0, biased_LE.argsort(descending=True)[:, :topk])
        kept = self._kept(chosen_LK, score_LE.detach(), logits_LE.detach())
        rows, count_E = [], torch.zeros(experts, dtype=torch.float64)
        for token in range(length):
            chosen = chosen_LK[token]
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
        z = logits_LE.logsumexp(-1).square().mean()
        next_L1 = biased_LE.sort(descending=True).values[:, min(topk, experts - 1)].unsqueeze(1)
        return torch.stack(rows), Router(probability_LE.mean(0), z, count_E, next_L1 - score_LE.detach())

    def _in_best_groups(self, score_LE: Tensor) -> Tensor:
        spec, found = self.model.router, score_LE.clone()
        if spec.groups == 1:
            return found
        for token, score_E in enumerate(score_LE):
            best = [sum(sorted(group.tolist())[-2 if spec.score == "sigmoid" else -1 :]) for group in score_E.chunk(spec.groups)]
            for group in sorted(range(spec.groups), key=lambda number: best[number])[: -spec.topk_groups]:
                size = len(score_E) // spec.groups
                found[token, group * size : (group + 1) * size] = -math.inf
        return found

    def _kept(self, chosen_LK: Tensor, score_LE: Tensor, logits_LE: Tensor) -> set[tuple[int, int]] | None:
        """Return the (token, expert) pairs within the capacity of a whole sequence; None if nothing is dropped."""
        spec, topk, (length, experts) = self.model.router, self.model.topk, score_LE.shape
        if spec.capacity_factor is None:
            return None
        capacity, kept = min(length, math.ceil(spec.capacity_factor * length * topk / experts)), set()
        weighed: dict[int, list[tuple[float, int]]] = {expert: [] for expert in range(experts)}
        for token in range(length):
            chosen = chosen_LK[token]
            after = spec.score == "softmax" and spec.softmax == "after_topk"
            weight_K = logits_LE[token, chosen].softmax(-1) if after else score_LE[token, chosen]
            weight_K = weight_K / weight_K.sum() if spec.normalize else weight_K
            for expert, weight in zip(chosen.tolist(), weight_K.tolist(), strict=True):
                weighed[expert].append((weight, token))
        for expert, rows in weighed.items():
            ordered = sorted(rows, key=lambda row: (-row[0], row[1])) if spec.drop == "probability" else rows
            kept |= {(token, expert) for _, token in ordered[:capacity]}
        return kept
