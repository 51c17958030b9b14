"""Chat templates: a conversation becomes text and tokens, and each token is the assistant's or not.

The template is the tokenizer's own, in Jinja (`tokenizer_config.json` or `chat_template.jinja`). transformers renders it in
Jinja's immutable sandbox, which hides Python's internals and refuses to change what it gets. Nothing else in the folder runs.

The assistant wrote these characters of the text:

- If the template has `{% generation %}`, those inside of it.
- Otherwise, for every message of the assistant, what follows the text of the messages before it with the generation prompt
  (`add_generation_prompt`), up to the end of the text of the messages up to it. If no message is before it, what follows the
  first generation prompt. This holds only if both texts begin the text of the whole conversation. If they do not, because the
  template shows a message differently when others follow, or because the generation prompt is not how the message begins, the
  conversation is refused.

A token is the assistant's if it has a character that the assistant wrote.

An answer ends with the first added token that the template puts behind it, such as `<|im_end|>`. In some templates there is
none, and the token that begins the next message ends it, such as `<|user|>`. Without tags, this token is the assistant's as well.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from foldray.errors import UserError
from trainers.data.tokenizers import FolderTokenizer, Tokenizer

Messages = Sequence[dict[str, Any]]
Spans = list[tuple[int, int]]
"""Characters [start, stop) of a text."""
_MOST_TEXT = 1 << 24  # characters of a conversation; tokenizers need about 250 bytes of memory for each
_LONGEST_S = 10.0  # seconds in which a template makes the text of a conversation; most need less than a millisecond
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_ANSWER = "zyxwvutsrq"  # of a conversation whose text shows what follows an answer; no template has this word


class Chat:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        if not isinstance(tokenizer, FolderTokenizer):
            raise UserError("data.tokenizer", "byte", "has no chat template; name a folder with a tokenizer that has one")
        self.tokenizer, self._inner = tokenizer, tokenizer.inner
        try:
            self._template = self._inner.get_chat_template()
        except ValueError:  # there is none, or only named ones
            rule = "has no chat template; it needs one in tokenizer_config.json or chat_template.jinja"
            raise self._refused(rule) from None
        if not isinstance(self._template, str):
            raise self._refused(f"has a chat template that is no text but {type(self._template).__name__}")
        self.has_tags = bool(_GENERATION.search(self._template))

    @property
    def ends(self) -> list[int]:
        """The tokens that end an answer: those of the template, and the tokenizer's eos token."""
        behind, beginnings = self._ends
        eos = [] if self.tokenizer.eos is None else [self.tokenizer.eos]
        return list(dict.fromkeys([*(behind or beginnings), *eos]))

    @cached_property
    def _ends(self) -> tuple[list[int], dict[int, str]]:
        """The token behind an answer, if there is one; or else the tokens that begin the messages behind it, with their texts."""
        if behind := self._behind([]):
            return list(behind), {}
        return [], {**self._behind([{"role": "user", "content": "a"}]), **self._behind([{"role": "tool", "content": "a"}])}

    def _behind(self, following: Messages) -> dict[int, str]:
        """Return the first added token behind an answer that other messages follow, with its text.

        Nothing is returned if there is no such token, or if the template takes no such conversation.
        """
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}, *following]
        try:
            text = self._render(messages, "an answer")
        except UserError:
            return {}
        _, answer, rest = text.rpartition(_ANSWER)
        added = self._inner.added_tokens_decoder
        ids = self._inner(rest, add_special_tokens=False, verbose=False)["input_ids"] if answer else []
        first = next((index for index in ids if index in added and added[index].content.strip()), None)
        return {} if first is None else {first: added[first].content}

    def check_offsets(self) -> None:
        if not self._inner.is_fast:
            raise self._refused("is not a fast tokenizer (tokenizer.json), so nobody knows which characters a token stands for")

    def encode(self, messages: Messages, place: object, masked: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a conversation, uint32 [n], and whether each is the assistant's, bool [n].

        The tokens are those of `apply_chat_template` in transformers.

        Args:
            place: where the conversation is, for messages; its `str` is taken only then.
            masked: False takes all tokens for the assistant's. This needs less of a template.
        """
        text, spans = self._written(messages, place) if masked else (self._render(messages, place), [])
        if len(text) > _MOST_TEXT:
            raise self._refused(f"makes a text of {len(text)} characters of {place}; at most {_MOST_TEXT} are allowed")
        encoded = self._inner(text, add_special_tokens=False, verbose=False, return_offsets_mapping=masked)
        ids = np.asarray(encoded["input_ids"], np.uint32)
        if not masked:
            return ids, np.ones(len(ids), bool)
        if not self.has_tags:
            spans = [(start, stop + self._end_at(text, stop)) for start, stop in spans]
        return ids, covered(encoded["offset_mapping"], spans)

    def _end_at(self, text: str, place: int) -> int:
        """Return the length of the token at a place of a text that ends an answer and begins the next message; 0 without one."""
        return next((len(end) for end in self._ends[1].values() if text.startswith(end, place)), 0)

    def _written(self, messages: Messages, place: object) -> tuple[str, Spans]:
        """Return the text of a conversation, and what the assistant wrote of it."""
        if self.has_tags:
            return self._tagged(messages, place)
        text, spans = self._render(messages, place), Spans()
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                through = self._render(messages[: number + 1], place)
                before = self._render(messages[:number], place, prompt=True) if number else self._opening(through, place)
                if not text.startswith(through):
                    raise self._unclear(f"shows message {number + 1} of {place} differently when other messages follow")
                if not through.startswith(before):
                    raise self._unclear(f"begins message {number + 1} of {place} in another way than its generation prompt")
                spans.append((len(before), len(through)))
        return text, spans

    def _opening(self, text: str, place: object) -> str:
        """Return what is in front of the assistant's message that begins a text.

        Most templates fail without any message, so a question shows the generation prompt.
        """
        question = [{"role": "user", "content": "?"}]
        prompt = self._render(question, place, prompt=True).removeprefix(self._render(question, place))
        if not prompt or prompt not in text:
            raise self._unclear(f"puts no generation prompt in front of message 1 of {place}, which is the assistant's")
        return text[: text.index(prompt) + len(prompt)]

    def prompt(self, messages: Messages) -> list[int]:
        """Return the tokens of a conversation with the generation prompt behind it."""
        text = self._render(messages, "the prompt", prompt=True)
        return list(self._inner(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _render(self, messages: Messages, place: object, prompt: bool = False) -> str:
        try:
            with _in_time():
                return self._inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template may raise anything that Python raises
            raise self._at_fault(place, error) from None

    def _tagged(self, messages: Messages, place: object) -> tuple[str, Spans]:
        # `apply_chat_template` returns a mask instead of spans. In its mask, the last character of a span is one token, even
        # if it is several, and a span whose last character is in no token goes to the end of the conversation.
        from transformers.utils.chat_template_utils import render_jinja_template

        options: dict[str, Any] = {"chat_template": self._template, "return_assistant_tokens_mask": True}
        try:
            with _in_time():
                rendered: Any = render_jinja_template([list(messages)], **options, **self._inner.special_tokens_map)
        except Exception as error:
            raise self._at_fault(place, error) from None
        (text,), (spans,) = rendered
        return text, spans

    def _at_fault(self, place: object, error: Exception) -> UserError:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        return self._refused(f"has a chat template that fails with {place} ({type(error).__name__}: {reason})")

    def _unclear(self, what: str) -> UserError:
        remedy = "mark that part in the template with {% generation %}"
        return self._refused(f"has a chat template that {what}, so nobody can tell what the assistant wrote; {remedy}")

    def _refused(self, rule: str) -> UserError:
        return UserError("data.tokenizer", self.tokenizer.name, rule)


@contextmanager
def _in_time() -> Iterator[None]:
    """Interrupt a template that takes longer than `_LONGEST_S`. Its loops may have any number of turns.

    Only the main thread can be interrupted; data are prepared there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {_LONGEST_S:.0f} s")

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, _LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # of a timer that somebody else had set
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


def covered(offsets: Spans, spans: Spans) -> np.ndarray:
    """Return which tokens with these offsets have a character in a span, bool [n].

    A token without characters counts as one at its start.
    """
    starts, stops = np.asarray(offsets, np.int64).reshape(-1, 2).T
    stops, inside = np.maximum(stops, starts + 1), np.zeros(len(starts), bool)
    for start, stop in spans:
        inside |= (starts < stop) & (stops > start)
    return inside
