"""Attention of one block of queries to one block of keys (a part), and the merge of such parts.

The softmax of a part is normalised over the part's own keys. Its log-sum-exp gives the part's weight against other parts
(Ring Attention, Liu et al. 2023; FlashAttention, Dao et al. 2022). `merge` joins two parts. Do not differentiate these
functions with autograd: the kernels give no gradient to the log-sum-exp, so the result would silently be wrong. The gradient
of the merged attention is the sum of `attend_backward` over the parts. Each of these calls takes the output and the
log-sum-exp of the *merged* attention.

Legend: B sequences, N query heads, G key/value heads (G divides N; query head n reads key/value head n // (N / G)), S
queries, T keys, D head size; values may have another width V. A mask is None (all keys), "causal" (S = T, query i sees keys
0…i), `KeyRanges`, or bool [B or 1, 1, S, T], true where a query sees a key.

Kernels never hold the scores [B, N, S, T]. Where none fits, plain products hold those of some queries at a time: on a GPU, in
float32 and float64, with bool masks, and with ranges of keys that no packed sequences express.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from foldray.kernels import fused
from foldray.kernels.autograd import at_least_float32
from foldray.kernels.key_ranges import KeyRanges, Spans

Mask: TypeAlias = Tensor | KeyRanges | Literal["causal"] | None

_MOST_SCORES = 2**25  # that plain products hold at once: 128 MiB in float32

_aten = torch.ops.aten


def attend(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Mask = None) -> tuple[Tensor, Tensor]:
    """Compute one part: the output [B, N, S, V], and the log-sum-exp [B, N, S] in at least float32.

    For a query that sees no key, the output is 0 and the log-sum-exp is −inf. The output may have a wider type than the
    inputs.
    """
    spans = _spans(q_BNSD, v_BGTD, mask)
    if spans is None and not _takes_fused(q_BNSD, v_BGTD, mask):
        return _attend_plain(q_BNSD, k_BGTD, v_BGTD, mask)
    scale, value_dim = q_BNSD.shape[-1] ** -0.5, v_BGTD.shape[-1]
    if spans is not None:
        out_BNSD, lse_BNS = _attend_packed(q_BNSD, k_BGTD, v_BGTD, spans, scale)
        return out_BNSD[..., :value_dim], lse_BNS
    q_BNSD, k_BGTD, v_BGTD = _one_width(q_BNSD, k_BGTD, v_BGTD)
    if q_BNSD.device.type == "cpu":
        out_BNSD, lse_BNS = _attend_cpu(q_BNSD, k_BGTD, v_BGTD, mask, scale)
    elif _takes_cudnn(q_BNSD):
        cudnn = _aten._scaled_dot_product_cudnn_attention
        out_BNSD, lse_BNS = cudnn(q_BNSD, k_BGTD, v_BGTD, None, True, 0.0, mask == "causal", scale=scale)[:2]
        lse_BNS = lse_BNS.view(out_BNSD.shape[:3])
    else:
        # The kernel returns nine results. All but the first two serve dropout and sequences of several lengths.
        flash = _aten._scaled_dot_product_flash_attention
        out_BNSD, lse_BNS = flash(q_BNSD, k_BGTD, v_BGTD, 0.0, mask == "causal", scale=scale)[:2]
    return out_BNSD[..., :value_dim], lse_BNS


def attend_backward(
    dout_BNSD: Tensor, q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor, mask: Mask = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one part's share of the gradients of queries, keys and values. The gradients may have wider types than these.

    Output and log-sum-exp must be merged over *all* parts that these queries attend to.
    """
    spans = _spans(q_BNSD, v_BGTD, mask)
    if spans is None and not _takes_fused(q_BNSD, v_BGTD, mask):
        return _attend_plain_backward(dout_BNSD, q_BNSD, k_BGTD, v_BGTD, out_BNSD, lse_BNS, mask)
    scale, key_dim, value_dim = q_BNSD.shape[-1] ** -0.5, k_BGTD.shape[-1], v_BGTD.shape[-1]
    inputs = (dout_BNSD, q_BNSD, k_BGTD, v_BGTD, out_BNSD)
    if spans is not None:
        gradients = _attend_packed_backward(inputs, lse_BNS, spans, scale)
    else:
        gradients = _fused_backward((*_one_width(*inputs), lse_BNS.contiguous()), mask, scale)
    dq_BNSD, dk_BGTD, dv_BGTD = gradients
    return dq_BNSD[..., :key_dim], dk_BGTD[..., :key_dim], dv_BGTD[..., :value_dim]


def merge(out_a_BNSD: Tensor, lse_a_BNS: Tensor, out_b_BNSD: Tensor, lse_b_BNS: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts of the same queries into their attention to the keys of both parts, in at least float32."""
    if fused.fits(out_a_BNSD, out_b_BNSD, lse_a_BNS, lse_b_BNS):
        return fused.merge(out_a_BNSD, lse_a_BNS, out_b_BNSD, lse_b_BNS)
    dtype = at_least_float32(out_a_BNSD)
    lse_BNS = torch.logaddexp(lse_a_BNS, lse_b_BNS)
    base_BNS = _finite(lse_BNS)
    weight_a_BNS1, weight_b_BNS1 = ((lse - base_BNS).exp().unsqueeze(-1).to(dtype) for lse in (lse_a_BNS, lse_b_BNS))
    return out_a_BNSD.to(dtype) * weight_a_BNS1 + out_b_BNSD.to(dtype) * weight_b_BNS1, lse_BNS


def by_token(out_BNSD: Tensor) -> Tensor:
    """Return an output whose heads lie beside each other in memory, so that the product behind it takes it without a copy."""
    return out_BNSD.transpose(1, 2).contiguous().transpose(1, 2)


def with_sinks(out_BNSD: Tensor, lse_BNS: Tensor, sink_N: Tensor) -> tuple[Tensor, Tensor]:
    """Give every head a score that takes a share of the softmax and adds nothing (GPT-OSS).

    `attend_backward` is right for the output and the log-sum-exp that this returns.
    """
    total_BNS = torch.logaddexp(lse_BNS, sink_N.to(lse_BNS.dtype).unsqueeze(-1))
    return out_BNSD * (lse_BNS - total_BNS).exp().unsqueeze(-1).to(out_BNSD.dtype), total_BNS


def finished(out_BNSD: Tensor, lse_BNS: Tensor, sink_N: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over all keys, with sinks if there are any, the output in a type and token by token."""
    if sink_N is not None:
        out_BNSD, lse_BNS = with_sinks(out_BNSD, lse_BNS, sink_N)
    return by_token(out_BNSD.to(dtype)), lse_BNS


def sinks_backward(dout_BNSD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor, sink_N: Tensor) -> Tensor:
    """Return the gradient of the scores of `with_sinks`: [N]. The output and the log-sum-exp are those that it returned."""
    share_BNS = (sink_N.to(lse_BNS.dtype).unsqueeze(-1) - lse_BNS).exp()
    delta_BNS = (_wide(dout_BNSD) * _wide(out_BNSD)).sum(-1)
    return -(share_BNS * delta_BNS).sum((0, 2)).to(sink_N.dtype)


def _attend_cpu(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    out_BNSD, lse_BNS = _aten._scaled_dot_product_flash_attention_for_cpu(
        q_BNSD, k_BGTD, v_BGTD, 0.0, mask == "causal", attn_mask=_bias(mask, q_BNSD.dtype), scale=scale
    )
    if isinstance(mask, Tensor):
        # For a query without keys, the kernel returns a log-sum-exp of 0, which `merge` would take for a key with weight 1.
        blind_B1S = ~mask.any(-1)
        out_BNSD = out_BNSD.masked_fill(blind_B1S.unsqueeze(-1), 0.0)
        lse_BNS = lse_BNS.masked_fill(blind_B1S, -math.inf)
    return out_BNSD, lse_BNS


def _fused_backward(inputs: tuple[Tensor, ...], mask: Mask, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` for heads of one width. The inputs are the output's gradient, q, k, v, the output and the log-sum-exp."""
    q_BNSD, k_BGTD, lse_BNS, causal = inputs[1], inputs[2], inputs[-1], mask == "causal"
    if q_BNSD.device.type == "cpu":
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(*inputs, 0.0, causal, attn_mask=_bias(mask, q_BNSD.dtype), scale=scale)
    # None for the cumulative lengths means that all sequences have one length. Only dropout reads the generator's state.
    lengths = (None, None, q_BNSD.shape[2], k_BGTD.shape[2])
    if _takes_cudnn(q_BNSD):
        unused = torch.empty((), dtype=torch.int64, device=q_BNSD.device)
        backward, lse_BNS1 = _aten._scaled_dot_product_cudnn_attention_backward, lse_BNS.unsqueeze(-1)
        return backward(*inputs[:-1], lse_BNS1, unused, unused, None, *lengths, 0.0, causal, scale=scale)
    unused = torch.empty(2, dtype=torch.uint64, device=q_BNSD.device)
    backward = _aten._scaled_dot_product_flash_attention_backward
    return backward(*inputs, *lengths, 0.0, causal, unused, unused, scale=scale)


def _attend_packed(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """`attend` with the kernel of packed sequences. Its outputs lie token by token."""
    packed, forward = _one_width(*map(_packed, (q_BNSD, k_BGTD, v_BGTD))), _aten._flash_attention_forward
    lengths, window = (*spans[:4], 0.0, spans.causal), spans.window
    out_QND, lse_NQ = forward(*packed, *lengths, False, scale=scale, window_size_left=window)[:2]
    if spans.blind:
        lse_NQ = lse_NQ.masked_fill(lse_NQ == math.inf, -math.inf)  # which `merge` takes for no weight
    return out_QND.unflatten(0, _sizes(q_BNSD)).transpose(1, 2), lse_NQ.unflatten(1, _sizes(q_BNSD)).transpose(0, 1)


def _attend_packed_backward(
    inputs: tuple[Tensor, ...], lse_BNS: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` with the kernel of packed sequences. The inputs are the output's gradient, q, k, v and the output."""
    packed, lse_NQ = _one_width(*map(_packed, inputs)), lse_BNS.transpose(0, 1).flatten(1).contiguous()
    unused, backward = torch.empty(2, dtype=torch.uint64, device=lse_BNS.device), _aten._flash_attention_backward
    lengths, window = (*spans[:4], 0.0, spans.causal), spans.window
    gradients = backward(*packed, lse_NQ, *lengths, unused, unused, scale=scale, window_size_left=window)
    dq, dk, dv = (x.unflatten(0, _sizes(like)).transpose(1, 2) for x, like in zip(gradients, inputs[1:4], strict=True))
    return dq, dk, dv


def _packed(x_BNSD: Tensor) -> Tensor:
    """Return a sequence behind the other: [B, N, S, D] → [B · S, N, D]. Of one sequence, this is a view."""
    return x_BNSD.transpose(1, 2).flatten(0, 1)


def _sizes(x_BNSD: Tensor) -> tuple[int, int]:
    return x_BNSD.shape[0], x_BNSD.shape[2]


def _attend_plain(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """`attend` with plain products in at least float32, on any device, for some queries at a time."""
    outs, lses = [], []
    for queries, keys, seen in _blocks(q_BNSD, k_BGTD, mask):
        score_BGRST = _scores(q_BNSD[:, :, queries], k_BGTD[:, :, keys], seen)
        lse_BGRS = score_BGRST.logsumexp(-1)
        weight_BGRST = (score_BGRST - _finite(lse_BGRS).unsqueeze(-1)).exp()
        outs.append((weight_BGRST @ _wide(v_BGTD[:, :, keys]).unsqueeze(2)).flatten(1, 2))
        lses.append(lse_BGRS.flatten(1, 2))
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 2), torch.cat(lses, 2))


def _attend_plain_backward(
    dout_BNSD: Tensor, q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, out_BNSD: Tensor, lse_BNS: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    groups, scale, dqs = k_BGTD.shape[1], q_BNSD.shape[-1] ** -0.5, []
    dk_BGTD, dv_BGTD = (torch.zeros_like(x, dtype=at_least_float32(x)) for x in (k_BGTD, v_BGTD))
    lse_BNS1 = _finite(lse_BNS).unsqueeze(-1)
    for queries, keys, seen in _blocks(q_BNSD, k_BGTD, mask):
        chosen = (x[:, :, queries] for x in (q_BNSD, dout_BNSD, out_BNSD, lse_BNS1))
        q_BGRSD, dout_BGRSD, out_BGRSD, lse_BGRS1 = (_by_group(_wide(x), groups) for x in chosen)
        k_BG1TD, v_BG1TD = (_wide(x[:, :, keys]).unsqueeze(2) for x in (k_BGTD, v_BGTD))
        p_BGRST = (_scores(q_BNSD[:, :, queries], k_BGTD[:, :, keys], seen) - lse_BGRS1).exp()
        delta_BGRS1 = (dout_BGRSD * out_BGRSD).sum(-1, keepdim=True)
        dscore_BGRST = p_BGRST * (dout_BGRSD @ v_BG1TD.mT - delta_BGRS1) * scale
        # The query heads of a group share a key/value head, so the gradient of that head is a sum over the group.
        dk_BGTD[:, :, keys] += (dscore_BGRST.mT @ q_BGRSD).sum(2)
        dv_BGTD[:, :, keys] += (p_BGRST.mT @ dout_BGRSD).sum(2)
        dqs.append((dscore_BGRST @ k_BG1TD).flatten(1, 2))
    return torch.cat(dqs, 2), dk_BGTD, dv_BGTD


def _blocks(q_BNSD: Tensor, k_BGTD: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield runs of queries whose scores fit `_MOST_SCORES`, each with the keys that it sees, and its mask."""
    (sequences, heads, queries), keys = q_BNSD.shape[:3], k_BGTD.shape[2]
    most = _MOST_SCORES // max(1, sequences * heads)
    # So many queries see at most `mask.widest` keys and as many more as there are queries.
    spare = math.isqrt(mask.widest**2 + 4 * most) - mask.widest if isinstance(mask, KeyRanges) else 0
    size = max(1, most // max(1, keys), spare // 2)
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        rows = slice(start, stop)
        if isinstance(mask, KeyRanges):
            yield rows, *mask.seen(rows)
        elif mask == "causal":
            ones_11ST = torch.ones((1, 1, stop - start, stop), dtype=torch.bool, device=q_BNSD.device)
            yield rows, slice(0, stop), ones_11ST.tril(start)
        else:
            yield rows, slice(0, keys), None if mask is None else mask[:, :, rows]


def _by_group(x_BNX: Tensor, groups: int) -> Tensor:
    """Return heads by the key/value head that they share: [B, N, …] → [B, G, N / G, …]. There may be no sequence."""
    return x_BNX.unflatten(1, (groups, x_BNX.shape[1] // groups))


def _scores(q_BNSD: Tensor, k_BGTD: Tensor, seen_B1ST: Tensor | None) -> Tensor:
    q_BGRSD = _by_group(_wide(q_BNSD), k_BGTD.shape[1])
    score_BGRST = q_BGRSD @ _wide(k_BGTD).unsqueeze(2).mT * q_BNSD.shape[-1] ** -0.5
    return score_BGRST if seen_B1ST is None else score_BGRST.masked_fill(~seen_B1ST.unsqueeze(2), -math.inf)


def takes_fused(q_BNSD: Tensor, v_BGTD: Tensor) -> bool:
    """Whether fused kernels take these tensors. CUDA's take 16 bits and head sizes up to 256."""
    if q_BNSD.device.type != "cuda":
        return q_BNSD.device.type == "cpu"
    if q_BNSD.dtype not in (torch.float16, torch.bfloat16) or max(q_BNSD.shape[-1], v_BGTD.shape[-1]) > 256:
        return False
    return torch.cuda.get_device_capability(q_BNSD.device) >= (8, 0)


def _takes_fused(q_BNSD: Tensor, v_BGTD: Tensor, mask: Mask) -> bool:
    """Whether fused kernels take these tensors with this mask. The CPU's take bool masks."""
    if isinstance(mask, KeyRanges) or (isinstance(mask, Tensor) and q_BNSD.device.type != "cpu"):
        return False
    return takes_fused(q_BNSD, v_BGTD)


def _spans(q_BNSD: Tensor, v_BGTD: Tensor, mask: Mask) -> Spans | None:
    """Return the spans of a mask, if the kernel of packed sequences takes them."""
    return mask.spans(len(q_BNSD)) if isinstance(mask, KeyRanges) and _packs(q_BNSD, v_BGTD) else None


def _packs(q_BNSD: Tensor, v_BGTD: Tensor) -> bool:
    return q_BNSD.device.type == "cuda" and len(q_BNSD) > 0 and takes_fused(q_BNSD, v_BGTD)


def _takes_cudnn(q_BNSD: Tensor) -> bool:
    """Whether cuDNN computes attention of these tensors, which `_takes_fused` lets pass.

    torch itself chooses cuDNN for whole sequences on these GPUs: on an H100 it takes half the time of its flash kernels.
    """
    if not torch.backends.cuda.cudnn_sdp_enabled() or not torch.backends.cudnn.is_available():
        return False
    return q_BNSD.shape[-1] <= 128 and torch.cuda.get_device_capability(q_BNSD.device) in ((9, 0), (10, 0))


def _bias(mask: Mask, dtype: torch.dtype) -> Tensor | None:
    """Turn a bool mask into the bias that the CPU's kernels add to the scores."""
    if not isinstance(mask, Tensor):
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _finite(lse: Tensor) -> Tensor:
    """Replace −inf by 0. Scores of −inf minus 0 give weights of 0, but −inf minus −inf would give NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _one_width(*tensors: Tensor) -> list[Tensor]:
    """Pad narrower heads with zeros, because fused kernels take one width only. Zeros change neither scores nor sums.

    The kernels also need the numbers of a row to be adjacent in memory. The numbers of an expanded gradient are not, so such
    a tensor is copied.
    """
    width = max(x.shape[-1] for x in tensors)
    width = width if tensors[0].device.type == "cpu" else -(-width // 8) * 8  # the step of CUDA's kernels
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _wide(x: Tensor) -> Tensor:
    return x.to(at_least_float32(x))
