"""The second level of rows that travel once to every node: from the rank that they reach to the ranks of its node.

A row travels between ranks with the same place on their nodes, once to a node. There it goes once to every rank with experts of
the token, whose results are summed before they travel back. So links between nodes carry least, and links inside a node carry
the rest (MegaScale-Infer, section 4, sends rows once to a rank; the two levels are those of DeepSeek-V3's report, section
3.2.2).

Legend: N rows that have arrived at this rank from other nodes or its own, M rows that ranks of its node pass on to it or it to
them, K experts per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from foldray.comm import Communicator, Pending, mirrored_together
from foldray.kernels.permutation import sum_rows
from foldray.moe.contracts import Received, Rows
from foldray.moe.once import Chosen, encode
from foldray.moe.wire import write


class InsideNode(NamedTuple):
    """The ranks of an expert-parallel group that share a node. Each has a run of their experts."""

    ranks: Communicator
    experts: int

    def run(self, compute: Callable[[Rows, Received], torch.Tensor], rows: Rows, received: Received) -> torch.Tensor:
        """Pass rows on to the ranks of their experts, compute them there, and sum what comes back: [N, H] → [N, H].

        All ranks of the node must call this. They wait for each other. Beside the rows are their weights [N, K], and the
        numbers of their experts on this node, −1 for experts of other nodes [N, K].
        """
        rows_NH, weight_NK, expert_NK = rows
        inside = received.inside
        leaving, arriving = inside.leaving_by_rank, inside.rows_by_rank
        chosen = Chosen(expert_NK.to(torch.int64), weight_NK, expert_NK >= 0)
        passed = encode(rows_NH, chosen, self.experts, self.ranks.size, room=sum(leaving))
        row_M, position_ND = passed.token_N, passed.position_TD
        out = partial(self._exchange, arriving=arriving, leaving=leaving)
        back = partial(self._exchange, arriving=leaving, leaving=arriving)
        rows = mirrored_together((passed.rows_NH, passed.weight_NK, passed.expert_NK), out, back)
        del passed  # its rows are not needed while the experts compute
        (results_MH,) = mirrored_together([compute(rows, inside)], back, out)
        return sum_rows(results_MH, row_M, position_ND)

    def _exchange(self, rows: Sequence[torch.Tensor], arriving: list[int], leaving: list[int]) -> Rows:
        travels, read = write(rows, None)
        return Pending.of(self.ranks.start_all_to_all(x, arriving, leaving) for x in travels).then(read).wait()
