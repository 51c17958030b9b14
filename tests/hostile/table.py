"""All rows of hostile inputs: `python -m tests.hostile.table > docs/notebook/hostile.md` counts them."""

from __future__ import annotations

from tests.hostile import addresses, models, recipes, runs

ROWS = [*recipes.ROWS, *runs.ROWS, *models.ROWS, *addresses.ROWS]
_PAGE = """\
# Hostile inputs

[What foldray promises](../running.md#safe-defaults) is held by `tests/hostile/`. Its tables have {count} inputs, as a user would
hand them to a command: a recipe, a folder of a run, a model of transformers, a tokenizer, data, an address. Each is refused with
exit code 2 and one line of printable text. No code in the input runs, no file changes, no host beyond the machine is asked by
Python code, no secret is shown, and the command takes less than 1 GiB more memory, and 20 s of a
processor.

| kind | inputs | such as | commands |
|---|---|---|---|
{rows}
"""


def page() -> str:
    """Return the page that counts the rows by kind."""
    kinds = dict.fromkeys(row.kind for row in ROWS)
    by_kind = {kind: [row for row in ROWS if row.kind == kind] for kind in kinds}
    lines = [
        f"| {kind} | {len(rows)} | {'; '.join(row.name for row in rows[:3])} | "
        f"{', '.join(sorted({row.command.split()[0] for row in rows}))} |"
        for kind, rows in by_kind.items()
    ]
    return _PAGE.format(count=len(ROWS), rows="\n".join(lines))


if __name__ == "__main__":
    print(page(), end="")
