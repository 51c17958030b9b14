"""All keys of a recipe as text: a page of the documentation, and a part of the command line's help.

`python -m foldray.recipe.page` prints docs/recipe.md. `make docs` writes that file.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from foldray.recipe.reading import describe, sections
from foldray.recipe.recipe import Recipe

_NARROWEST, _WIDEST = 50, 100  # columns of the help

_INTRODUCTION = """# Recipe keys

A recipe is a YAML file with the sections below. Only the section `model` is required. It names a `preset`, or it gives
every size that the table marks as required.

```yaml
model: {preset: tiny}
fold: {ep: 2}
cluster: {workers: 2}
```

Every command that reads a recipe takes changes after the file name, such as `training.steps=1000`. The value is YAML, so
`null`, `true`, `[1, 2, 4]` and `{kind: torch}` are values, too.

The [glossary](glossary.md) explains the words. `foldray train --help` and `foldray tune --help` show the same
descriptions. They come from `foldray/recipe/` and `foldray/blueprint/model.py`, and `make docs` writes this page from
them.
"""

Row = tuple[str, str, str, str]


def page() -> str:
    """Return the page in Markdown, with one table for each section."""
    parts = [_INTRODUCTION]
    for name, about, rows in _tables():
        title = f"## `{name}`" if name else "## Keys outside of sections"
        lines = ["| key | values | default | what it does |", "|---|---|---|---|"]
        lines += [f"| `{key}` | {_code(legal)} | `{default}` | {meaning} |" for key, legal, default, meaning in rows]
        parts.append("\n\n".join([title, *([about] if about else []), "\n".join(lines)]) + "\n")
    return "\n".join(parts)


def key_help(tuning: bool = False, width: int | None = None) -> str:
    """Return the help of all keys outside `tune`, or of those of `tune`, wrapped for this terminal or another width."""
    width = max(_NARROWEST, min(_WIDEST, width or shutil.get_terminal_size().columns - 1))
    lines = _wrapped("Keys of a recipe. Change one with key=value, where the value is YAML.", width)
    for name, about, rows in _tables():
        if (name.split(".")[0] == "tune") != tuning:
            continue
        lines += ["", *_wrapped(f"{name}: {' '.join(about.split())}" if name else "outside of sections:", width)]
        for key, legal, default, meaning in rows:
            default = default if default == "required" else f"default {default}"
            lines += _wrapped(f"{key}  ({legal.replace('|', ' | ')}; {default})", width, "  ", "        ")
            lines += _wrapped(meaning, width, "      ", "      ")
    return "\n".join(lines)


def _wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )


def _tables() -> Iterator[tuple[str, str, list[Row]]]:
    """Yield (name, description, keys) of every section. The keys outside of sections come first, without a name."""
    keys: dict[str, list[Row]] = {}
    for row in describe(Recipe):
        keys.setdefault(row[0].rpartition(".")[0], []).append(row)
    yield "", "", keys[""]
    for name, about in sections(Recipe):
        yield name, about, keys[name]


def _code(legal: str) -> str:
    return ", ".join(word if " " in word else f"`{word}`" for word in legal.split("|"))


if __name__ == "__main__":
    print(page(), end="")
