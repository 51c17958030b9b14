"""Completion in a shell: bash reads the script, and is asked for completions as with its TAB key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foldray.cli import main
from foldray.cli.arguments import SHELLS
from foldray.cli.completion import overrides
from tests.pool import repository

ASK = """
source <(foldray completion bash)
COMP_LINE=$1 COMP_POINT=${#1}
_python_argcomplete foldray
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and with the command `foldray`."""
    folder = tmp_path_factory.mktemp("shell")
    command = folder / "bin" / "foldray"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m foldray "$@"\n')
    command.chmod(0o755)
    (folder / "mine.yaml").write_text("model: {preset: tiny}\n")
    (folder / "notes.txt").write_text("no recipe\n")
    return folder


def asked(place: Path, line: str) -> list[str]:
    pytest.importorskip("argcomplete")
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    names = [str(repository()), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(names)}
    done = subprocess.run(["bash", "-c", ASK, "ask", line], cwd=place, env=path, capture_output=True, text=True, check=True)
    return [word.strip() for word in done.stdout.splitlines() if word]


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("foldray tr", ["train"]),
        ("foldray train --re", ["--resume"]),
        ("foldray train m", ["mine.yaml"]),
        (
            "foldray train mine.yaml training.s",
            ["training.steps=", "training.stop_after=", "training.seed=", "training.skip_steps="],
        ),
        ("foldray train mine.yaml fold.ep=2 engine.kind=", ["deepspeed", "torch"]),
        ("foldray plan --model mixtral-8x7", ["mixtral-8x7b"]),
        ("foldray plan --sharding ", ["zero1", "zero3"]),
        ("foldray plan --cluster eos", ["eos-h100"]),
        ("foldray eval run no", ["notes.txt"]),
        ("foldray completion f", ["fish"]),
    ],
)
def test_bash_offers(place: Path, line: str, offered: list[str]) -> None:
    """After `key=`, bash replaces only what follows the sign."""
    assert [word for word in asked(place, line) if not word.startswith("-") or "--" in line] == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert main(["completion", shell, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["shell"] == shell
    assert "foldray" in document["script"]
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == document["script"] + "\n"


def test_without_argcomplete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "zsh"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("foldray: completion=zsh: needs the package 'argcomplete', which is not installed")
    assert line.endswith("pip install argcomplete\n")


def test_changes_to_a_recipe() -> None:
    assert {"name=", "fold.ep=", "tune.space.tp="} <= set(overrides(""))
    assert overrides("engine.z") == ["engine.zero="]
    assert overrides("engine.zero=") == ["engine.zero=0", "engine.zero=1", "engine.zero=2"]
    assert overrides("schedule.sp_bytes=") == ["schedule.sp_bytes=auto", "schedule.sp_bytes=null"]
    assert overrides("model.preset=tiny") == ["model.preset=tiny", "model.preset=tiny-gpt", "model.preset=tiny-fine"]
    assert overrides("schedule.kind=module") == []
    assert overrides("data.path=/") == []
    assert overrides("no.key=") == []
