"""Hostile values for every key of a recipe: `python -m tests.foldray.hostile PART PARTS` tries a part of them.

It prints one JSON document. Run it as a separate process with limits, because a fault may use all memory.
"""

from __future__ import annotations

import copy
import json
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from foldray import Recipe, UserError
from foldray.recipe import describe
from foldray.recipe.reading import apply

SECONDS, CHARACTERS, MEMORY = 2.0, 2500, 2**31
BASES: list[dict[str, Any]] = [
    {"model": {"preset": "tiny"}, "cluster": {"workers": 2}, "engine": {"kind": "torch"}},
    {
        "model": {"preset": "tiny-fine", "router": {"capacity_factor": 1.5, "drop": "position", "drop_scope": "sequence"}},
        "fold": {"ep": 4, "tp": 2},
        "schedule": {
            "kind": "stream", "degree": 4, "slicing": "algorithm1", "reduction": "chunks", "sp_bytes": 4096, "virtual_stages": 1,
        },
        "training": {"micro_batch": 4, "global_batch": 32},
        "data": {"seq_len": 512},
        "cluster": {"workers": 8},
    },
]  # fmt: skip

_WHOLE = [0, 1, -1, 2, 3, 7, 64, 65537, 2**17, 2**20, 2**24, 2**31, 2**63, -(2**63), 10**18, 999999999989, 10**22, 10**400]
_BROKEN = [
    ".5",
    "-0.0",
    "1e-320",
    "1.5",
    "1e308",
    "-1e308",
    "1e999",
    ".inf",
    "-.inf",
    ".nan",
    "0x" + "f" * 5000,
    "1_000",
    "1:30:00",
]
_WORDS = [
    "", "null", "~", "true", "no", "x", '""', '" "', '"0"', '"1"', "'1e3'", "'９'", "١٢", "'²'", "nan", "auto", "stream", "byte",
    "2020-01-01", "2020-01-01T00:00:00Z", "é" * 300, "😀", "'\u202e'", r'"\e[2J"', r'"\0"', r'"\ud800"', r'"a\nb"', "x" * 100,
    "x" * 5000, "x" * 100_000, "../" * 50, "~nobody/x", "/dev/zero", "%s%n", "{}", "file:///nowhere", "http://u:hush@h:x/?token=hush",
]  # fmt: skip
_SEVERAL = [
    "[]", "[0]", "[1]", "[x]", "[null]", "[true]", "[[]]", "[[x]]", "[-1, 2]", "[1, [2, [3]]]", "[1, 1]", "[.inf]",
    "[10000000000000]",    "[attention, x]", "{0: 1}", "{a: b}", "{kind: x}", "{x: {y: {z: 1}}}", "{? [a] : b}",
    "!!set {a}", "!!binary aGk=",
    "!!omap [a: 1]",    "[" * 30 + "]" * 30, "[" * 3000, "&a [*a]", "[&a x, *a, *a]", "!!python/object:os.system {}",
    "a: b: c", "'", "{", "\t", "&", "*a",
    f"[{', '.join('1' * 400)}]", f"[{', '.join('12345678')}]", f"[{', '.join(['x'] * 3000)}]", f"[{', '.join('1' * 30_000)}]",
    f"[{', '.join(map(str, range(1, 257)))}]", f"{{{', '.join(f'k{n}: 1' for n in range(300))}}}", f"[{'1, 2, 4, 8, 16, ' * 3}1]",
]  # fmt: skip
VALUES = [*map(str, _WHOLE), *_BROKEN, *_WORDS, *_SEVERAL]


def overrides() -> list[str]:
    """Return an override for each key and value, and some that name no key. Every call returns the same list."""
    keys = [key for key, *_ in describe(Recipe)]
    sections = sorted({key.rpartition(".")[0] for key in keys} - {""})
    strange = [
        f"{key}=1" for key in ("a." * 5000 + "a", "model." * 30 + "x", "model.preset." * 9 + "x", "x" * 100_000, "é", "0.0")
    ]
    return [f"{key}={value}" for key in (*keys, *sections) for value in VALUES] + strange


def outcome(override: str, base: dict[str, Any]) -> str | None:
    """Return the fault in the answer to an override; None if the override is accepted, or refused in one line."""
    given = copy.deepcopy(base)
    try:
        apply(given, override)
        recipe = Recipe.parse(given)
        Recipe.parse(recipe.model_dump(mode="json"))
        assert recipe.orderings
    except UserError as error:
        line = str(error)
        if "\n" in line or not line.isprintable() or len(line) > CHARACTERS:
            return f"a line of {len(line)} characters: {line[:300]!r}"
        return f"a secret: {line}" if "hush" in line else None
    except Exception:
        return traceback.format_exc(limit=-4)
    return None


def peak_bytes() -> int:
    """Return the peak memory of this process. (`getrusage` also counts the memory of its parent at the fork.)"""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def main(part: int, parts: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    failures, slowest, count = [], (0.0, ""), 0
    for number, override in enumerate(overrides()[part::parts]):
        began = time.process_time()
        wrong = outcome(override, BASES[number % len(BASES)])
        seconds = time.process_time() - began
        slowest, count = max(slowest, (seconds, override[:80])), count + 1
        if wrong or seconds > SECONDS:
            failures.append(f"{override[:80]} ({seconds:.1f} s): {wrong or 'slow'}")
    peak = peak_bytes()
    print(json.dumps({"count": count, "failures": failures, "slowest": slowest, "peak": peak}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
