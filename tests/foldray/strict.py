"""A communicator over gloo that forgives as little as NCCL does, for parity tests on CPUs.

- The results of an operation are poison until somebody has waited for it.
- The inputs of an operation must not change until somebody has waited for it.
- The futures of an operation are done at once, because those of NCCL are done when the operation is in the queue.
- Somebody must wait for every operation before the step ends.
- All ranks start all operations in one total order (`order.py`).

A send ends only after its receive has been posted; gloo's own sends are so, too. All-to-alls of tokens start at once, as on
GPUs, and no thread starts them later. Classes of gradients with the same members share a process group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.futures import Future

from foldray.comm import Communicator, DispatchQueue, Groups, Pending
from foldray.runtime import Execution
from tests.foldray.order import Meeting, Started, check_order
from tests.pool import RankPool, RankPools

_OWN = (str(Path(__file__)), str(Path(sys.modules[Communicator.__module__].__file__ or "").parent))


class EarlyReuse(AssertionError):
    """Somebody has written to a tensor of an operation before anybody waited for it."""


class MissingWait(AssertionError):
    """Nobody has waited for an operation."""


class Ledger:
    """What one rank has started on all communicators of a `Groups`, and what nobody has waited for yet.

    Attributes:
        started: all operations, in the order of their starts.
    """

    def __init__(self) -> None:
        self.started: list[Started] = []
        self._numbers: Counter[tuple] = Counter()
        self._open: dict[StrictWork, str] = {}
        self._lock = Lock()  # a queue's thread starts operations, too

    def start(self, work: StrictWork, communicator: str, kind: str, meetings: Sequence[tuple[int, ...]], single: bool) -> None:
        """Note an operation.

        Args:
            meetings: the members of a collective, or sender and receiver of each message.
            single: whether the meetings are messages.
        """
        where = _caller()
        with self._lock:
            found = []
            for ranks in meetings:
                key = communicator, ranks, single
                found.append(Meeting(communicator, kind, ranks, self._numbers[key]))
                self._numbers[key] += 1
            self.started.append(Started(tuple(found), where))
            self._open[work] = f"{work.name}, started at {where}"

    def waited(self, work: StrictWork) -> None:
        with self._lock:
            self._open.pop(work, None)

    def check(self) -> None:
        """Check that somebody has waited for every operation.

        Raises:
            MissingWait: some operations are open. The message names them.
        """
        if self._open:
            raise MissingWait("nobody has waited for " + "; ".join(self._open.values()))


class StrictWork:
    """A running operation. `Pending` treats it as it treats one of torch.distributed.

    Args:
        name: of the communicator and the operation, with shapes.
        hidden: the operation on hidden tensors.
        results: the tensors that the caller holds; `wait` fills them.
        sent: inputs of the caller, and copies of them.
    """

    def __init__(
        self, name: str, ledger: Ledger, hidden: Pending, results: Sequence[Tensor], sent: Sequence[tuple[Tensor, Tensor]]
    ):
        self.name, self._ledger, self._hidden = name, ledger, hidden
        self._results, self._sent = [poison(each) for each in results], sent

    def get_future(self) -> Future:
        done: Future = Future()
        done.set_result(None)
        return done

    @staticmethod
    def is_completed() -> bool:
        """Nobody knows before somebody has waited."""
        return False

    @torch.no_grad()
    def wait(self) -> None:
        arrived = self._hidden.wait()
        for x, before in self._sent:
            if not _same(x, before):
                raise EarlyReuse(f"early reuse: an input {tuple(x.shape)} of {self.name} has changed before anybody waited")
        for result, tensor in zip(self._results, arrived, strict=True):
            if not _same(result, _poisoned(result.shape, result)):
                raise EarlyReuse(f"early reuse: a result {tuple(result.shape)} of {self.name} was written before anybody waited")
            result.copy_(tensor)
        self._results, self._sent = [], []
        self._ledger.waited(self)


@dataclass(frozen=True)
class StrictCommunicator(Communicator):
    """See the module. `ledger` notes what it starts."""

    ledger: Ledger = field(default_factory=Ledger, compare=False)

    def start_all_reduce(self, x: Tensor, reduction: Literal["sum", "max"] = "sum") -> Pending:
        if self.group is None:
            return super().start_all_reduce(x, reduction)
        return self._collective("all-reduce", super().start_all_reduce(_copy(x), reduction), [x], [])

    def start_all_gather(self, x: Tensor) -> Pending:
        if self.group is None:
            return super().start_all_gather(x)
        sent, out = [(x, _copy(x))], _poisoned((self.size * x.shape[0], *x.shape[1:]), x)
        return self._collective("all-gather", super().start_all_gather(sent[0][1]), [out], sent)

    def start_reduce_scatter(self, x: Tensor, out: Tensor) -> Pending:
        sent = [(x, _copy(x))]
        return self._collective("reduce-scatter", super().start_reduce_scatter(_copy(x), torch.empty_like(out)), [out], sent)

    def start_all_to_all(self, x: Tensor, received: Sequence[int], sent: Sequence[int], room: int | None = None) -> Pending:
        if self.group is None:
            return super().start_all_to_all(x, received, sent, room)
        inputs, out = [(x, _copy(x))], _poisoned((sum(received) if room is None else room, *x.shape[1:]), x)
        return self._collective("all-to-all", super().start_all_to_all(inputs[0][1], received, sent, room), [out], inputs)

    def send_rows(self, tensors: Sequence[Tensor], to: Mapping[int, int]) -> Pending:
        sent = [(tensor, _copy(tensor)) for tensor in tensors]
        pending = super().send_rows([copy for _, copy in sent], to)
        out = [(self.index, member) for member, rows in to.items() for tensor in tensors if rows and tensor.numel()]
        return self._messages_of("rows", pending, [], sent, out) if out else pending

    def receive_rows(self, tensors: Sequence[Tensor], of: Mapping[int, int]) -> Pending:
        coming = [(member, self.index) for member, rows in of.items() for tensor in tensors if rows and tensor.numel()]
        if not coming:
            return super().receive_rows(tensors, of)
        return self._messages_of("rows", super().receive_rows(list(map(torch.empty_like, tensors)), of), tensors, [], coming)

    def shift(self, tensors: Sequence[Tensor]) -> Pending:
        if self.group is None:
            return super().shift(tensors)
        sent, after, before = (
            [(each, _copy(each)) for each in tensors],
            (self.index + 1) % self.size,
            (self.index - 1) % self.size,
        )
        messages = [pair for _ in tensors for pair in ((before, self.index), (self.index, after))]
        results = [_poisoned(each.shape, each) for each in tensors]
        return self._messages_of("shift", super().shift([copy for _, copy in sent]), results, sent, messages)

    def send(self, x: Tensor, member: int) -> Pending:
        copy = _copy(x)
        return self._messages_of("message", super().send(copy, member), [], [(x, copy)], [(self.index, member)])

    def receive(self, into: Tensor, member: int) -> Pending:
        hidden = super().receive(torch.empty_like(into), member)
        return self._messages_of("message", hidden, [into], [], [(member, self.index)])

    def _collective(
        self, kind: str, hidden: Pending, results: Sequence[Tensor], sent: Sequence[tuple[Tensor, Tensor]]
    ) -> Pending:
        return self._strict(kind, hidden, results, sent, [self.ranks], False)

    def _messages_of(
        self,
        kind: str,
        hidden: Pending,
        results: Sequence[Tensor],
        sent: Sequence[tuple[Tensor, Tensor]],
        messages: Sequence[tuple[int, int]],
    ) -> Pending:
        """Return messages that start together. A message is a pair of members: sender and receiver."""
        ranks = [(self.ranks[sender], self.ranks[receiver]) for sender, receiver in messages]
        return self._strict(kind, hidden, results, sent, ranks, True)

    def _strict(
        self,
        kind: str,
        hidden: Pending,
        results: Sequence[Tensor],
        sent: Sequence[tuple[Tensor, Tensor]],
        meetings: Sequence[tuple[int, ...]],
        single: bool,
    ) -> Pending:
        tensors = [*results, *(x for x, _ in sent)]
        shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
        work = StrictWork(
            f"the {kind} of {self.name} among ranks {self.ranks}, shapes {shapes}", self.ledger, hidden, results, sent
        )
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        self.ledger.start(work, self.name, f"{dtype} {kind}", meetings, single)
        return Pending([work], results)  # type: ignore[list-item]


class AsOnGpu(DispatchQueue):
    """A queue as on a GPU: the caller starts operations itself, all-to-alls of tokens behind what it computes next."""

    def start(self, begin: Callable[[], Pending], ready: bool, device: torch.device | None = None) -> Pending:
        return begin() if device is None or (ready and not self._later) else self._line_up(begin)


def strict(groups: Groups, ledger: Ledger) -> Groups:
    """Return these groups with strict communicators."""
    given = {each.name: getattr(groups, each.name) for each in fields(Groups)}
    found = replace(
        groups,
        **{
            name: StrictCommunicator(**vars(each), ledger=ledger)
            for name, each in given.items()
            if isinstance(each, Communicator)
        },
    )
    for queue in ("tokens_queue", "rows_queue"):
        object.__setattr__(found, queue, AsOnGpu())
    object.__setattr__(found, "tokens_inside_queue", AsOnGpu(found.tokens_queue))
    object.__setattr__(found, "ledger", ledger)
    return found


@contextmanager
def strict_groups() -> Iterator[list[Ledger]]:
    """All new groups are strict, and every step must have waited for all operations. Yields the ledgers of the groups."""
    ledgers: list[Ledger] = []
    create, further, train, evaluate = Groups.create, Groups.communicator, Execution.train, Execution.evaluate

    def strict_create(*arguments: Any, **options: Any) -> Groups:
        ledgers.append(Ledger())
        return strict(create(*arguments, **{"share": True, **options}), ledgers[-1])

    def strict_further(groups: Any, *arguments: Any) -> StrictCommunicator:
        return StrictCommunicator(**vars(further(groups, *arguments)), ledger=groups.ledger)

    def checked(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(execution: Execution, *arguments: Any) -> Any:
            found = step(execution, *arguments)
            for ledger in ledgers:
                ledger.check()
            return found

        return run

    with (
        patch.object(Groups, "create", strict_create),
        patch.object(Groups, "communicator", strict_further),
        patch.object(Execution, "train", checked(train)),
        patch.object(Execution, "evaluate", checked(evaluate)),
    ):
        yield ledgers


def strictly(rank: int, case: Callable[..., Any], *arguments: Any) -> tuple[Any, list[list[Started]]]:
    """Run a case of a rank with strict groups. Return its result, and what it has started by groups."""
    with strict_groups() as ledgers:
        found = case(rank, *arguments)
    for ledger in ledgers:
        ledger.check()
    return found, [ledger.started for ledger in ledgers]


class StrictPool:
    """A pool whose ranks run cases with strict groups. Afterwards it checks their order."""

    def __init__(self, pool: RankPool):
        self._pool = pool

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        answers = self._pool.run(strictly, case, *arguments)
        for logs in zip(*(logs for _, logs in answers), strict=True):
            check_order(dict(enumerate(logs)))
        return [found for found, _ in answers]


class StrictPools:
    """Strict pools by their number of ranks; tests use them like `RankPools`."""

    def __init__(self, pools: RankPools):
        self._pools = pools

    def __call__(self, world: int) -> StrictPool:
        return StrictPool(self._pools(world))


def poison(x: Tensor) -> Tensor:
    """Fill a tensor with numbers that nobody can take for results."""
    with torch.no_grad():
        x.detach().fill_(_poison_of(x.dtype))
    return x


def _poison_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    limits = torch.iinfo(dtype)
    return limits.min or limits.max


def _poisoned(shape: Sequence[int], like: Tensor) -> Tensor:
    return poison(torch.empty(tuple(shape), dtype=like.dtype, device=like.device))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape have the same bits."""
    a, b = (each.detach().contiguous().flatten().view(torch.uint8) for each in (x, y))
    return torch.equal(a, b)


def _caller() -> str:
    """Return the line of code that starts an operation: the innermost one outside of this module and of communicators."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
