"""Rows that travel once to every rank, however many of its experts a token has.

The weights travel with the rows, and the rank of the experts sums the results of its experts. So a token has at most one row
for each rank, in both directions (DisagMoE, section 4.2; MegaScale-Infer, section 4). Where links between nodes are slow, a
token travels once to every node first. Then a rank below is a node.

The second level goes from the rank that rows reach to the ranks of its node (`Relay`). A row travels between ranks with the
same place on their nodes, once to a node. There it goes once to every rank with experts of the token, whose results are summed
before they travel back. So links between nodes carry least, and links inside a node carry the rest (DeepSeek-V3's report, section
3.2.2).

Legend: T tokens, K experts per token, R ranks of experts, N rows (pairs of a token and a rank, rank by rank), D = min(K, R) the
most rows of a token, M rows that ranks of a node pass on to each other, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from foldray.comm import Communicator, DispatchQueue, Pending, used_here
from foldray.kernels.permutation import combine, permute, sum_rows
from foldray.moe.contracts import Rows, Sent
from foldray.moe.exchange import write
from foldray.moe.router import Routing


class Chosen(NamedTuple):
    """The numbers and weights of tokens' experts, and which of them count (bool; None if all do)."""

    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    keep_TK: torch.Tensor | None

    @classmethod
    def of(cls, routing: Routing) -> Chosen:
        return cls(routing.expert_TK, routing.weight_TK, routing.keep_TK)

    def owners(self, experts: int, ranks: int) -> torch.Tensor:
        """Return the ranks of the experts, `ranks` for experts that do not count. Each rank has a run of all `experts`."""
        owner_TK = self.expert_TK // (experts // ranks)
        return owner_TK if self.keep_TK is None else owner_TK.masked_fill(~self.keep_TK, ranks)


class OncePerRank(NamedTuple):
    """How ordinary expert parallelism sends a token once to every rank, or to every node. The host does not wait for the device.

    So it does not know how many rows there are before it reads their counts, and the tensors that leave have room for T · D
    rows. `Sent.memory` is the token of each row and the rows of each token (`Encoded`). Each of the EP ranks has a run of the
    experts, and `inside` of them share a node. With more than 1, a token travels once to a node, and not to a rank.
    """

    ranks: int
    inside: int = 1

    def encode(self, x_TH: torch.Tensor, routing: Routing) -> tuple[tuple[torch.Tensor, ...], Sent]:
        """Return rows [T · D, H], their weights, and the numbers of their experts; and the state that `decode` needs."""
        experts, chosen, places = routing.targets, Chosen.of(routing), self.ranks // self.inside
        room = len(x_TH) * min(routing.expert_TK.shape[1], places)
        encoded = encode(x_TH, chosen, experts, places, room)
        chosen_M = chosen.owners(experts, experts).flatten()
        rows_E = chosen_M.new_zeros(experts + 1).scatter_add_(0, chosen_M, torch.ones_like(chosen_M))[:experts]
        memory, rows_P = (encoded.token_N, encoded.position_TD), encoded.goes_TR.sum(0)
        rows_R, rows_N = rows_P, None
        if self.inside > 1:
            rows_R, rows_N = _goes(chosen.owners(experts, self.ranks), self.ranks).sum(0), rows_P
        sent = Sent(rows_E, memory, rows_R=rows_R, rows_N=rows_N, room=room)
        return (encoded.rows_NH, encoded.weight_NK, encoded.expert_NK), sent

    def decode(self, y_NH: torch.Tensor, sent: Sent) -> torch.Tensor:
        """Return the sum of each token's rows: [N, H] → [T, H]."""
        token_N, position_TD = sent.memory
        return sum_rows(y_NH, token_N[: len(y_NH)], position_TD)


class Encoded(NamedTuple):
    """The rows of one rank's tokens, sorted by the rank that they go to. There may be more of them than pairs.

    Beside the rows are the weights of a token's experts (0 for those of other ranks), and the numbers of the experts on the rank
    that the row goes to (int32; −1 for experts of other ranks). The rows of a token are −1 if it has fewer than D.
    """

    rows_NH: torch.Tensor
    weight_NK: torch.Tensor
    expert_NK: torch.Tensor
    token_N: torch.Tensor
    position_TD: torch.Tensor
    goes_TR: torch.Tensor


def encode(x_TH: torch.Tensor, chosen: Chosen, experts: int, ranks: int, room: int | None = None) -> Encoded:
    """Copy tokens to rows.

    Args:
        chosen: the tokens' experts. Those that do not count make no rows.
        experts: number of all experts, a multiple of `ranks`. Each rank has a run of them.
        room: number of rows to make, at least as many as there are pairs of a token and a rank. The rest is padding: any
            token, no weight and no expert. With None, the host waits for the device, and makes no padding.
    """
    (tokens, topk), owner_TK = chosen.expert_TK.shape, chosen.owners(experts, ranks)
    goes_TR = _goes(owner_TK, ranks)
    position_TR = _positions(goes_TR)
    rows = int(goes_TR.sum()) if room is None else room
    # What belongs to no row goes to one more row, which is cut off.
    place_TR = torch.where(goes_TR, position_TR, rows)
    token_T = torch.arange(tokens, device=owner_TK.device)
    token_N = token_T.new_zeros(rows + 1).scatter_(0, place_TR.flatten(), token_T.repeat_interleave(ranks))[:rows]
    place_TK = torch.cat([place_TR, place_TR.new_full((tokens, 1), rows)], 1).gather(1, owner_TK)
    slot_M = (place_TK * topk + torch.arange(topk, device=place_TK.device)).flatten()
    weight_NK = chosen.weight_TK.new_zeros((rows + 1) * topk).scatter(0, slot_M, chosen.weight_TK.flatten())
    local_M = (chosen.expert_TK % (experts // ranks)).to(torch.int32).flatten()
    expert_NK = local_M.new_full(((rows + 1) * topk,), -1).scatter_(0, slot_M, local_M)
    weight_NK, expert_NK = (x.view(rows + 1, topk)[:rows] for x in (weight_NK, expert_NK))
    position_TD = position_TR if ranks <= topk else position_TR.topk(topk, 1).values
    return Encoded(permute(x_TH, token_N, position_TD), weight_NK, expert_NK, token_N, position_TD, goes_TR)


def decode(y_NH: torch.Tensor, goes_TR: torch.Tensor) -> torch.Tensor:
    """Return the sum of each token's rows: [N, H] → [T, H]. Its backward is `copy_to_ranks`."""
    return combine(y_NH, _positions(goes_TR), y_NH.new_ones(goes_TR.shape))


def copy_to_ranks(x_TH: torch.Tensor, goes_TR: torch.Tensor) -> torch.Tensor:
    """Copy tokens to their rows: [T, H] → [N, H]."""
    _, token_N = goes_TR.T.nonzero(as_tuple=True)
    return x_TH[token_N]


def _goes(owner_TK: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return whether a token has experts on a rank, from the ranks of its experts: bool [T, R]."""
    return owner_TK.new_zeros(len(owner_TK), ranks + 1, dtype=torch.bool).scatter_(1, owner_TK, True)[:, :ranks]


def _positions(goes_TR: torch.Tensor) -> torch.Tensor:
    """Return the row of each token for each rank, −1 if it has none."""
    return torch.where(goes_TR, goes_TR.T.flatten().cumsum(0).view(goes_TR.T.shape).T - 1, -1)


class PassedOn(NamedTuple):
    """What this rank passes on of a piece to the ranks of its node.

    Args:
        experts: number of the node's experts. Each of its ranks has a run of them.
        leaving, arriving: number of rows that go to each rank of the node, and that come from it.
    """

    experts: int
    leaving: list[int]
    arriving: list[int]


def count_passed_on(ranks: Communicator, experts: int, expert_NK: torch.Tensor) -> PassedOn:
    """Return what the ranks of a node pass on to each other, if nobody has told them.

    All of them must call this. They wait for each other, and the host for the device. The numbers of experts are as in `Relay`.
    """
    owner_NK = (expert_NK // (experts // ranks.size)).masked_fill(expert_NK < 0, ranks.size)
    count_RR = ranks.all_gather(_goes(owner_NK, ranks.size).sum(0)).view(ranks.size, ranks.size).tolist()
    return PassedOn(experts, count_RR[ranks.index], [count_R[ranks.index] for count_R in count_RR])


class Relay:
    """The exchange inside a node (`contracts.NodeExchange`), for one piece.

    Beside rows are their weights [N, K], and the numbers of their experts on this node, −1 for experts of other nodes [N, K].
    On the way out, a row is copied for every rank with experts of it. On the way back, its copies are summed.

    Args:
        ranks: those of the node.
        queue: in which their all-to-alls start.
        device: that of the rows.
        passed_on: returns what is passed on, once rows have come.
    """

    def __init__(self, ranks: Communicator, queue: DispatchQueue, device: torch.device, passed_on: Callable[[], PassedOn]):
        self._ranks, self._queue, self._device, self._passed_on = ranks, queue, device, passed_on
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None  # the row of each copy [M], the copies of each row [N, D]

    def start_out(self, rows: Pending) -> Pending:
        def begin() -> Pending:
            passed_on = self._passed_on()
            copies = self._copied(used_here(rows.wait()), passed_on)
            return self._exchange(copies, passed_on.arriving, passed_on.leaving)

        return self._queue.start(begin, not rows.is_running, self._device)

    def start_back(self, rows: Pending) -> Pending:
        def begin() -> Pending:
            passed_on = self._passed_on()
            return self._exchange(used_here(rows.wait()), passed_on.leaving, passed_on.arriving, self._summed)

        return self._queue.start(begin, not rows.is_running, self._device)

    def _copied(self, rows: Rows, passed_on: PassedOn) -> Rows:
        rows_NH, *beside = rows
        if self._places is not None:
            return [permute(rows_NH, *used_here(self._places))]
        weight_NK, expert_NK = beside
        chosen = Chosen(expert_NK.to(torch.int64), weight_NK, expert_NK >= 0)
        copies = encode(rows_NH, chosen, passed_on.experts, self._ranks.size, room=sum(passed_on.leaving))
        self._places = copies.token_N, copies.position_TD
        return [copies.rows_NH, copies.weight_NK, copies.expert_NK]

    def _summed(self, rows: Rows) -> Rows:
        assert self._places is not None, "nothing was passed on"
        row_M, copy_ND = used_here(self._places)
        return [sum_rows(x, row_M, copy_ND) for x in rows]

    def _exchange(self, rows: Rows, arriving: list[int], leaving: list[int], read_on: Callable[[Rows], Rows] = list) -> Pending:
        travels, read = write(rows, None)
        sent = Pending.of(self._ranks.start_all_to_all(x, arriving, leaving) for x in travels)
        return sent.then(lambda tensors: read_on(read(tensors)))
