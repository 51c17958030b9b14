"""Files that people name: read only if they are of a size that makes sense, and YAML without surprises."""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path
from typing import Any

import yaml

from foldray.errors import UserError

_MOST_BYTES = 2**18
_LONGEST = 2**13  # characters of a value; what looks like a number of more of them would take minutes to read
_MOST_NODES = 10_000  # values, keys, lists and mappings, each as often as aliases repeat it
_DEEPEST = 40


def read_text(field: str, path: str | Path) -> str:
    """The text of a file.

    Raises:
        UserError: it cannot be read, is no regular file (which might have no end, or never begin), too large, or no text.
    """
    try:
        with open(Path(path), "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(field, str(path), "cannot be read (it is no regular file)")
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UserError(field, str(path), f"cannot be read (it is larger than {_MOST_BYTES >> 10} KiB)")
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(field, str(path), f"is no UTF-8 text ({error})") from None
    except (OSError, ValueError) as error:
        raise UserError(field, str(path), f"cannot be read ({getattr(error, 'strerror', None) or error})") from None


def load_yaml(field: str, path: str | Path) -> Any:
    """The values of a YAML file.

    Raises:
        UserError: as `read_text`; or it is not YAML.
    """
    text = read_text(field, path)
    try:
        return read_yaml(text)
    except Exception as error:
        raise UserError(field, str(path), f"is not YAML ({one_line(error)})") from None


def read_yaml(text: str) -> Any:
    """The values of a YAML text: PyYAML promises no type for what it raises (a date's ValueError, a tag's KeyError were seen).

    Raises:
        Exception: it is not YAML; a key stands twice, there are control characters, or more of it than makes sense.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} characters")
    return yaml.load(text, _Loader)


def one_line(error: Exception) -> str:
    """What an error says, without its line breaks."""
    return " ".join(str(error).replace('"<unicode string>", ', "").split())[:200]


class _Loader(yaml.SafeLoader):
    """YAML of a bounded size whose keys stand once each: PyYAML would take the last of several in silence."""

    def __init__(self, text: str):
        super().__init__(text)
        self._nodes, self._depth = 0, 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Counts what is there once all aliases are followed: merges follow them, and whatever looks at the values."""
        line, before, alias = self.peek_event().start_mark.line + 1, self._nodes, self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"nested deeper than {_DEEPEST} levels in line {line}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        # An alias of what it stands in itself has no end.
        self._nodes += self._sizes.get(id(node), _MOST_NODES) if alias else 1
        if self._nodes > _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES} values, with all aliases followed, up to line {line}")
        self._sizes[id(node)] = self._nodes - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ValueError(f"the key {key.value!r} stands twice, the second time in line {key.start_mark.line + 1}")
            seen.add(str(key.value))
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if len(node.value) > _LONGEST:
            raise ValueError(f"a value of more than {_LONGEST} characters in line {node.start_mark.line + 1}")
        strange = next((each for each in node.value if unicodedata.category(each) in ("Cc", "Cs") and each not in "\t\n"), None)
        if strange is not None:
            what = "a zero byte" if strange == "\0" else f"the control character {strange!r}"
            raise ValueError(f"{what} in line {node.start_mark.line + 1}, which no name or path may hold")
        return node
