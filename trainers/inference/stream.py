"""Text from tokens that come one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "�"
_BEFORE = 8  # tokens; a tokenizer may need some to know whether a token begins a word


class TextStream:
    """Turns tokens into pieces of text. A piece has only whole characters, and the pieces make up the text of all tokens.

    Args:
        decode: `Tokenizer.decode`. The stream of the library tokenizers takes only tokenizers of its own.
        before: the tokens before the first one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(before[-_BEFORE:])
        self._first = 0  # from here on, tokens are decoded
        self._finished = len(self._tokens)  # the text of the tokens before this one is out

    def add(self, token: int) -> str:
        """Return the text that is complete with this token; it may be empty."""
        self._tokens.append(token)
        before, text = self._texts()
        if len(text) <= len(before) or text.endswith(_UNFINISHED):
            return ""
        self._first, self._finished = self._finished, len(self._tokens)
        return text[len(before) :]

    def rest(self) -> str:
        """Return the text of the last tokens, which may end within a character."""
        before, text = self._texts()
        return text[len(before) :]

    def _texts(self) -> tuple[str, str]:
        # The text of a token depends on the tokens before it, so the text of new tokens alone would be another.
        return self._decode(self._tokens[self._first : self._finished]), self._decode(self._tokens[self._first :])
