"""Conversations: messages in files become tokens with a mask, and are packed whole into sequences.

No conversation continues in another sequence, because its later tokens would be trained without those before. So sequences
are filled up with separators, which do not count in the loss. Best-fit decreasing (Ding et al., *Fewer Truncations Improve
Language Modeling*, arXiv:2404.10830) leaves few of them. A conversation that is longer than a sequence loses its end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from foldray.errors import UserError
from foldray.recipe.data import Invalid
from trainers.data.chat import Chat
from trainers.data.encode import Work, token_dtype
from trainers.data.rows import Part, cut, read_rows
from trainers.data.shards import Piece
from trainers.data.sources import SourceFile
from trainers.data.tokenizers import Tokenizer
from trainers.data.unfit import Unfit, mended

_MOST_PACKED = 1 << 26  # tokens that are packed together; only a large compressed file has more
ROLES = ("system", "developer", "user", "assistant", "tool")


class Conversation(NamedTuple):
    """The ids of a conversation, uint32 [n], and whether each counts in the loss, bool [n]."""

    tokens: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class Reader:
    """Reads conversations from files.

    Args:
        messages_field: the key or column of the messages.
        masked: whether only the assistant's tokens count; False counts all.
        rule: what becomes of conversations that cannot be used.
    """

    chat: Chat
    messages_field: str
    masked: bool = True
    rule: Invalid = "refuse"

    def __post_init__(self) -> None:
        if self.masked:
            self.chat.check_offsets()

    def check(self, file: SourceFile) -> None:
        """Check the first conversation of a file."""
        next(self.read(next(cut([file])), Unfit(self.rule)), None)

    def read(self, part: Part, unfit: Unfit) -> Iterator[Conversation]:
        """Yield the conversations of a part of a file, in order. The first token of each does not count."""
        field = "data.messages_field"
        for row in read_rows(part, field, self.messages_field, unfit):
            place = row.place(unfit)
            try:
                messages = messages_of(row.value, place, field, self.messages_field)
                tokens, trained = self.chat.encode(messages, place, self.masked)
            except UserError as error:
                unfit.leaves(part.file.locate(), error)
                continue
            trained[:1] = False  # nothing is before it
            yield Conversation(tokens, trained)


def encode(work: Work, unfit: Unfit, reader: Reader, seq_len: int) -> Iterator[Piece]:
    """Read, tokenize and pack the conversations of a work. The tokens of each piece are a multiple of `seq_len`.

    A conversation without a token that counts is left out.
    """
    kept, tokens, counts, ends = list[Conversation](), 0, Counter[str](), reader.chat.ends
    for part in work.parts:
        for whole in reader.read(part, unfit):
            head = Conversation(whole.tokens[:seq_len], whole.trained[:seq_len])
            if head.trained.any():
                kept.append(head)
                tokens += len(head.tokens)
                counts["cut"] += len(whole.tokens) > seq_len
                counts["ended"] += bool(np.isin(head.tokens[head.trained], ends).any())
            else:
                counts["left_out"] += 1
            if tokens >= _MOST_PACKED:
                yield _packed(kept, counts, reader.chat.tokenizer, seq_len)
                kept, tokens, counts = [], 0, Counter()
    yield _packed(kept, counts, reader.chat.tokenizer, seq_len)


def _packed(kept: list[Conversation], counts: Counter[str], tokenizer: Tokenizer, seq_len: int) -> Piece:
    sequences = pack([len(conversation.tokens) for conversation in kept], seq_len)
    tokens = np.full((len(sequences), seq_len), tokenizer.separator, token_dtype(tokenizer.vocab_size))
    trained, starts, filled = np.zeros(tokens.shape, np.uint8), list[int](), 0
    for row, numbers in enumerate(sequences):
        start = 0
        for conversation in (kept[number] for number in numbers):
            stop = start + len(conversation.tokens)
            tokens[row, start:stop], trained[row, start:stop] = conversation
            starts.append(row * seq_len + start)
            start = stop
        filled += seq_len - start
    counted = {"conversations": len(kept), **{name: counts[name] for name in ("cut", "left_out", "ended")}}
    return Piece(
        tokens=tokens.reshape(-1),
        lengths=np.zeros(tokens.size, np.uint32),
        starts=np.asarray(starts, np.int64),
        pairs=None,
        trained=trained.reshape(-1),
        counts={**counted, "trained": int(trained.sum()), "filled": filled},
    )


def end(tokenizer: Tokenizer) -> Piece:
    """Return the end of a split: one separator, the target of its last token."""
    separator = np.asarray([tokenizer.separator], token_dtype(tokenizer.vocab_size))
    return Piece(separator, np.zeros(1, np.uint32), np.zeros(0, np.int64), None, np.zeros(1, np.uint8))


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins by best-fit decreasing. Return the items' numbers in each bin.

    The longest item comes first. Each goes into the fullest bin that has room for it, or into a new one.
    """
    bins, room = list[list[int]](), list[tuple[int, int]]()  # (free, index of the bin), the least free first
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fullest = bisect_left(room, (lengths[number], -1))
        free, index = room.pop(fullest) if fullest < len(room) else (capacity, len(bins))
        if index == len(bins):
            bins.append([])
        bins[index].append(number)
        insort(room, (free - lengths[number], index))
    return bins


def summary(meta: Mapping[str, Any]) -> str:
    """Return a line about packed conversations, by the content of `meta.json`."""
    counts = [meta[split]["counts"] for split in ("train", "validation")]
    both = Counter[str](counts[0])
    both.update(counts[1])  # unlike +, this keeps counts of 0
    tokens = meta["seq_len"] * sum(meta[split]["sequences"] for split in ("train", "validation"))
    parts = [f"conversations: {counts[0]['conversations']} for training, {counts[1]['conversations']} for validation"]
    if both["cut"]:
        parts.append(f"{both['cut']} longer than {meta['seq_len']} tokens, cut at their end")
    if both["left_out"]:
        parts.append(f"{both['left_out']} without a token to train on, left out")
    if "ended" in both and not both["ended"]:  # data of an earlier version do not say it
        parts.append("no answer ends with a token that stops generation, so the model does not learn to stop")
    trained, filled = both["trained"] / tokens, both["filled"] / tokens
    parts.append(f"{trained:.1%} of all tokens count in the loss, and {filled:.1%} only fill sequences up")
    return "; ".join(parts)


def messages_of(given: Any, place: object, field: str, value: object) -> list[dict[str, Any]]:
    """Return the messages of a conversation, a value of JSON, without keys that are null.

    Args:
        place: where the conversation is, for errors; its `str` is taken only then.
        field, value: what the user calls it, for errors.
    """
    if not isinstance(given, list) or not given:
        kind = "an empty list" if given == [] else type(given).__name__
        raise UserError(field, value, f"is not a list of messages but {kind} in {place}")

    def refused(number: int, rule: str, legal: Sequence[str] | None) -> UserError:
        return UserError(field, value, f"message {number} in {place} {rule}", legal)

    return [_message(message, partial(refused, number)) for number, message in enumerate(given, 1)]


def _message(given: Any, refused: Callable[[str, Sequence[str] | None], UserError]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise refused(f"is not an object but {type(given).__name__}", None)
    try:
        message = mended({key: value for key, value in given.items() if value is not None})
    except RecursionError:
        raise refused("is nested too deeply", None) from None
    if "role" not in message:
        raise refused(f'has no "role"; it has {", ".join(map(str, given)) or "nothing"}', None)
    if message["role"] not in ROLES:
        raise refused(f"has the role {message['role']!r}", ROLES)
    content = message.get("content")
    # A message that calls tools may have no content.
    if not isinstance(content, str) and not (content is None and message["role"] == "assistant" and message.get("tool_calls")):
        raise refused(f'has no text as "content" but {"nothing" if content is None else type(content).__name__}', None)
    return message
