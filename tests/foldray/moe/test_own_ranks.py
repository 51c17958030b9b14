"""Rows on the routes between attention and experts that have ranks of their own: none is lost, and each comes home."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foldray.comm import Groups
from foldray.fold import Fold
from foldray.moe.apart import ExpertExchange, TokenExchange
from foldray.moe.once import Chosen, Encoded, encode
from foldray.nodes.routes import Routes
from tests.gate import examples

K, LOCAL = 2, 2  # experts per token, experts per rank


def mark(rank: int) -> float:
    """Return the value of a rank's tokens: a power of two, so large that sums of up to 31 rows name each sender and its rows."""
    return 2.0 ** (5 * rank)


def routed(rank: int, ranks: int, tokens: int, dropping: bool = False) -> tuple[torch.Tensor, Chosen]:
    """Return the tokens of a rank of attention, which all have its mark, and their experts on some ranks."""
    generator = torch.Generator().manual_seed(rank)
    expert_TK = torch.rand(tokens, LOCAL * ranks, generator=generator).argsort(1)[:, :K]
    keep_TK = torch.rand(tokens, K, generator=generator) < 0.6 if dropping else None
    chosen = Chosen(expert_TK, torch.ones(tokens, K, dtype=torch.float64), keep_TK)
    return torch.full((tokens, 1), mark(rank), dtype=torch.float64), chosen


@given(
    st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(1, 3),
    st.sampled_from([1, 2]), st.integers(1, 4), st.integers(1, 2), st.integers(1, 3),
    st.integers(0, 9), st.booleans(),
)  # fmt: skip
@examples(150)
def test_rows_are_conserved_on_every_route(tp, cp, dp, pp, etp, ep, edp, expert_pp, tokens, dropping) -> None:
    """Every copy of the experts' inputs has each kept assignment of its senders once, and nothing else."""
    experts = etp * ep * edp * expert_pp
    fold = Fold(tp * cp * dp * pp + experts, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep, expert_ranks=experts, expert_pp=expert_pp)
    routes = Routes(fold)
    for before in range(fold.pp):
        senders = [rank for rank in fold.attention.ranks if fold.attention.coordinate(rank)["pp"] == before]
        # Neighbours have different numbers of tokens, so that their rows cannot be taken for each other's.
        rows = {rank: encode(*routed(rank, ep, tokens + rank % 2, dropping), LOCAL * ep, ep) for rank in senders}
        for position in range(fold.moe_pp):
            sent = {rank: _by_receiver(rows[rank], routes.receivers(rank, position)) for rank in senders}
            arrived = defaultdict[int, Counter[int]](Counter)  # sender → expert → rows
            for receiver in [rank for rank in fold.moe.ranks if fold.moe.coordinate(rank)["pp"] == position]:
                for sender in routes.senders(receiver, before):
                    rows_NH, expert_NK = sent[sender].pop(receiver)
                    assert torch.all(rows_NH == mark(sender))
                    first = fold.moe.coordinate(receiver)["ep"] * LOCAL
                    arrived[sender].update((expert_NK[expert_NK >= 0] + first).tolist())
            assert not any(sent.values())
            for sender in senders:
                _, chosen = routed(sender, ep, tokens + sender % 2, dropping)
                kept = chosen.expert_TK if chosen.keep_TK is None else chosen.expert_TK[chosen.keep_TK]
                assert arrived[sender] == Counter(kept.flatten().tolist())


def _by_receiver(rows: Encoded, receivers: tuple[int, ...]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return what goes to each receiver: the rows, and the numbers of their experts there."""
    count_R = rows.goes_TR.sum(0).tolist()
    return dict(zip(receivers, zip(rows.rows_NH.split(count_R), rows.expert_NK.split(count_R), strict=True), strict=True))


FOLDS = [
    Fold(5, ep=2, expert_ranks=2),
    Fold(8, tp=2, pp=2, ep=2, expert_ranks=4, expert_pp=2),
    Fold(8, cp=2, pp=2, etp=2, ep=2, expert_ranks=4, expert_pp=1),
]


def own_rows(rank: int, fold: Fold, empty: bool) -> Encoded:
    """Return the rows of a rank of attention."""
    return encode(*routed(rank, fold.ep, 0 if empty else 3 + rank), LOCAL * fold.ep, fold.ep)


def _round_trips(rank: int, fold: Fold, empty: bool) -> dict[tuple[int, int, int], float]:
    """Send rows to every position of experts and from there to every position of attention; return the sums that arrive.

    A sum is keyed by the positions that the rows come from, of their experts, and of the results. Rows have the mark of their
    sender. Ranks of attention return the sums of results.
    """
    groups, found = Groups.create(fold, rank), dict[tuple[int, int, int], float]()
    own = groups.fold.coordinate(rank)["attention" if groups.owns_tokens else "moe"]["pp"]
    for before, position, after in itertools.product(range(fold.pp), range(fold.moe_pp), range(fold.pp)):
        if not groups.owns_tokens:
            if own == position:
                found[before, position, after] = _serve(groups, before, after)
            continue
        exchange = TokenExchange(groups, position)
        if own == before:
            rows = own_rows(rank, fold, empty)
            count_R = rows.goes_TR.sum(0)
            counts = exchange.start_counts(count_R)
            exchange.start_out([rows.rows_NH], count_R.tolist()).wait()
            counts.wait()
        if own == after:
            found[before, position, after] = _come_home(exchange, fold, _same_place(fold, rank, before), position, empty)
    groups.close()
    return found


def _come_home(exchange: TokenExchange, fold: Fold, peer: int, position: int, empty: bool) -> float:
    """Receive the results of the rank with the same place at the position before, check them, and return their sum."""
    count_R = own_rows(peer, fold, empty).goes_TR.sum(0)
    (y_NH,) = exchange.start_back([torch.empty(0, 1, dtype=torch.float64)], count_R.tolist, True).wait()
    # The experts of receiver r have sent 2^r times the row.
    wanted = [mark(peer) * 2.0**r for r in Routes(fold).receivers(peer, position)]
    assert torch.equal(y_NH[:, 0], torch.tensor(wanted, dtype=torch.float64).repeat_interleave(count_R))
    return float(y_NH.sum())


def _serve(groups: Groups, before: int, after: int) -> float:
    """Receive rows, send them back times 2^rank, and return their sum."""
    exchange = ExpertExchange(groups, before, after)
    (count_S,) = exchange.start_counts(torch.device("cpu")).wait()
    counts = count_S.tolist()
    (rows_NH,) = exchange.start_rows([torch.empty(0, 1, dtype=torch.float64)], lambda: counts, True).wait()
    exchange.start_results([rows_NH * 2.0**groups.rank], counts).wait()
    return float(rows_NH.sum())


def _same_place(fold: Fold, rank: int, position: int) -> int:
    """Return the rank of attention at a position with the place that a rank has at its own."""
    place = fold.attention.coordinate(rank) | {"pp": position}
    (found,) = [other for other in fold.attention.ranks if fold.attention.coordinate(other) == place]
    return found


@pytest.mark.gate(3)
@pytest.mark.parametrize("fold", FOLDS, ids=str)
@pytest.mark.parametrize("empty", [False, True], ids=["rows", "no rows"])
def test_sums_of_powers_name_who_sent_what_to_whom(ranks, fold: Fold, empty: bool) -> None:
    """Every rank of experts gets from each of its senders as many rows as that one routes to it."""
    found, routes = ranks(fold.world_size).run(_round_trips, fold, empty), Routes(fold)
    for receiver in fold.moe.ranks:
        place = fold.moe.coordinate(receiver)
        assert len(found[receiver]) == fold.pp**2
        for (before, _, _), total in found[receiver].items():
            goes = {sender: own_rows(sender, fold, empty).goes_TR[:, place["ep"]] for sender in routes.senders(receiver, before)}
            assert total == sum(mark(sender) * int(goes_T.sum()) for sender, goes_T in goes.items())
    assert all(len(found[rank]) == fold.pp * fold.moe_pp for rank in fold.attention.ranks)
