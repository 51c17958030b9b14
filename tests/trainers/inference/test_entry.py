"""`foldray generate` and `foldray eval` on the terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foldray.cli import main
from tests.trainers.checkpoints.damage import FILE, flipped
from tests.trainers.hugging_face.test_export import make_run
from trainers.inference import entry
from trainers.inference.model import Model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkpoint of an untrained model, which computes on the CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    make_run(tmp_path / "run")
    return str(tmp_path / "run" / "step_00000003")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_generate_prints_the_text_and_one_line_end(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = Model.load(step).generate("def ", 12, top_k=9, seed=4)
    options = ["--prompt", "def ", "--tokens", "12", "--top-k", "9", "--seed", "4"]
    assert said(capsys, "generate", step, *options) == expected.text.rstrip("\n") + "\n"
    document = json.loads(said(capsys, "generate", step, *options, "--json"))
    written = {key: value for key, value in expected._asdict().items() if key != "experts"}
    assert document == {"run": step, "step": 3, "prompt": "def ", **written}


def test_text_comes_token_by_token(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first piece is out before the second token is drawn."""
    drawn, out = list[int](), list[tuple[int, str]]()

    def draw(sampler: object, logit_V: object) -> int:
        drawn.append(104)
        return 104

    monkeypatch.setattr("trainers.inference.sampling.Sampler.draw", draw)
    monkeypatch.setattr(entry, "_write", lambda text: out.append((len(drawn), text)))
    assert main(["generate", step, "--prompt", "", "--tokens", "3"]) == 0
    assert out == [(1, "h"), (2, "h"), (3, "h")]


def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entry._write("a\x1b[2J\tb\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    entry._write("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\x1b[2J\tb\na�[2J\tb\n"


@pytest.mark.nightly("two processes that load a model")
def test_a_reader_that_goes_ends_it(step: str) -> None:
    command = [sys.executable, "-m", "foldray", "generate", step, "--prompt", "hello", "--tokens", "16000000", "--top-k", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=600) == 0


def test_eval_scores_each_file_and_all_together(step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("a.txt", "[b].txt")]
    texts = ["def f(x):\r\n    return 'größer'\n" * 3, "x"]
    for file, text in zip(files, texts, strict=True):
        Path(file).write_text(text, newline="")
    model = Model.load(step)
    scores = [model.evaluate(text, 16) for text in texts]
    document = json.loads(said(capsys, "eval", step, *files, "--seq-len", "16", "--json"))
    together = document.pop("together")
    each = [{"file": file, **score.as_dict()} for file, score in zip(files, scores, strict=True)]
    assert document == {"run": step, "step": 3, "seq_len": 16, "files": each}
    assert together == (scores[0] + scores[1]).as_dict()
    shown = said(capsys, "eval", step, *files)
    assert "in windows of 32 tokens" in shown  # data.seq_len
    assert shown.split("together")[1].split()[:2] == [f"{scores[0].tokens + 1}", f"{scores[0].bytes + 1}"]
    assert f"{model.evaluate(texts[1]).bits_per_byte:.4f}" in shown
    assert "[b].txt" in shown.replace("\n", "").replace(" ", "")
    assert "together" not in said(capsys, "eval", step, files[0])


def test_mistakes_are_one_line(step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, empty, binary = (tmp_path / name for name in ("good.txt", "empty.txt", "binary.txt"))
    good.write_text("x")
    empty.write_text("\ufeff")  # a mark of the byte order is no text
    binary.write_bytes(b"a\xff")
    make_run(tmp_path / "damaged")
    flipped(FILE)(tmp_path / "damaged" / "step_00000003")
    damaged, run = str(tmp_path / "damaged" / "step_00000003"), str(tmp_path)
    prompt = ["--prompt", "x"]
    for arguments, line in (
        (["generate", str(tmp_path / "none"), *prompt], "is not a checkpoint's folder, or does not exist"),
        (["generate", run, *prompt], "holds no checkpoint"),
        (["generate", damaged, *prompt], "is damaged: __0_0.distcp has other bytes"),
        (["generate", step, *prompt, "--tokens", "0"], "tokens=0: must be at least 1"),
        (["generate", "none", *prompt, "--tokens", "0"], "tokens=0: must be at least 1"),  # before the checkpoint is looked for
        (["generate", "none", *prompt, "--top-k", "0"], "top_k=0: must be at least 1"),
        (["eval", "none", str(empty)], "is empty"),
        (["eval", "none", str(good), "--seq-len", "0"], "seq_len=0: must be at least 1"),
        (["generate", step, *prompt, "--temperature", "-1"], "temperature=-1.0: must be at least 0"),
        (["generate", step, *prompt, "--temperature", "nan"], "temperature=nan: must be at least 0"),
        (["generate", step, *prompt, "--top-p", "1.5"], "top_p=1.5: must be greater than 0"),
        (["generate", step, *prompt, "--top-k", "0"], "top_k=0: must be at least 1"),
        (["generate", step, "--prompt", "\udcff"], r"prompt=\udcff: is not UTF-8 text"),
        (["eval", str(tmp_path / "none"), str(good)], "is not a checkpoint's folder, or does not exist"),
        (["eval", damaged, str(good)], "is damaged: __0_0.distcp has other bytes"),
        (["eval", step, str(good), str(tmp_path / "absent.txt")], "cannot be read (No such file or directory)"),
        (["eval", step, str(good), str(tmp_path)], "cannot be read (Is a directory)"),
        (["eval", step, str(good), str(empty)], "is empty"),
        (["eval", step, str(good), str(binary)], "is not UTF-8 text ('utf-8' codec can't decode byte 0xff"),
        (["eval", step, str(good), "--seq-len", "0"], "seq_len=0: must be at least 1"),
    ):
        assert main(arguments) == 2, line
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("foldray: ")
        assert err.count("\n") == 1, err
        assert line in err
