"""Mistakes on the command line: each gives exit code 2 and one line, and leaves no files behind."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import foldray
from foldray import Fold
from foldray.cli import main
from foldray.recipe import Recipe, describe
from tests.foldray.test_recipe import GOOD

ROOT = Path(__file__).parents[1]
DIGITS = "9" * 5000  # more than Python reads as one integer
Outcome = Callable[..., tuple[str, str]]
Refused = Callable[..., str]


class Trained:
    """Replaces `trainers.driver.entry`. It records the recipes that the command line accepts, and does not train them."""

    def __init__(self) -> None:
        self.recipes: list[Recipe] = []
        self.options: list[dict] = []

    def train(self, recipe: Recipe, **options: object) -> int:
        self.recipes.append(recipe)
        self.options.append(options)
        return 0


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    recorder = Trained()
    monkeypatch.setitem(sys.modules, "trainers.driver.entry", SimpleNamespace(train=recorder.train))
    return recorder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a good recipe and a folder that is not a recipe."""
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(GOOD))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def outcome(here: Path, trained: Trained, capsys: pytest.CaptureFixture[str]) -> Outcome:
    """`outcome(*arguments)` runs a command that must be refused, and returns its standard output and its line of error."""

    def run(*arguments: str) -> tuple[str, str]:
        before = sorted(here.rglob("*"))
        code = main(arguments)
        out, line = capsys.readouterr()
        assert code == 2
        assert line.startswith("foldray: ")
        assert line.endswith("\n")
        assert line.count("\n") == 1
        assert "Traceback" not in line
        assert not trained.recipes
        assert sorted(here.rglob("*")) == before
        return out, line

    return run


@pytest.fixture
def refused(outcome: Outcome) -> Refused:
    """`refused(*arguments)` runs a command that must be refused without standard output, and returns its line of error."""

    def run(*arguments: str) -> str:
        out, line = outcome(*arguments)
        assert out == ""
        return line

    return run


def said(line: str, *fragments: str) -> None:
    for fragment in fragments:
        assert fragment in line


COMMANDS: list[tuple[list[str], tuple[str, ...]]] = [
    ([], ("arguments=nothing", "required: COMMAND", "foldray --help")),
    (
        ["trian", "good.yaml"],
        (
            "command=trian",
            "did you mean 'train'?",
            "legal: train, submit, verify, bench, timeline, tune, dashboard, plan, calibrate, generate, eval, status, health, ",
        ),
    ),
    (
        ["help"],
        (
            "command=help",
            "is not known",
            "legal: train, submit, verify, bench, timeline, tune, dashboard, plan, calibrate, generate, eval, status, health, "
            "export-hf, import-hf, slice, explain, recipes, completion",
        ),
    ),
    (["--verbose"], ("arguments=--verbose", "required: COMMAND")),
    (["--verbose", "train", "good.yaml"], ("argument=--verbose", "is not known to foldray", "legal: --help")),
    (["train"], ("arguments=nothing", "required: RECIPE;", "foldray train --help")),
    (["train", "good.yaml", "--stpes", "3"], ("argument=--stpes", "is not known to foldray train", "legal: --help, --json")),
    (["train", "good.yaml", "--adress", "x:1"], ("argument=--adress", "did you mean '--address'?")),
    (["train", "good.yaml", "--resume"], ("arguments=good.yaml --resume", "--resume: expected one argument")),
    (["train", "good.yaml", "--json=3"], ("arguments=good.yaml --json=3", "ignored explicit argument '3'")),
    (["train", "good.yaml", "good.yaml"], ("override=good.yaml", "must read key.sub=value")),
    (["submit", "good.yaml"], ("arguments=good.yaml", "required: --address")),
    (
        ["slice", "--seq-len", "1" + 18 * "0", "--degree", "4", "--hidden", "8", "--heads", "1"],
        ("seq_len=1000", "at most 16777216"),
    ),
    (["slice", "--seq-len", "64", "--degree", "100000", "--hidden", "8", "--heads", "1"], ("degree=100000", "at most 256")),
    (["slice", "--seq-len", "64", "--degree", "4", "--hidden", "0", "--heads", "1"], ("hidden=0", "must be at least 1")),
    (["submit", "good.yaml", "--address", "127.0.0.1:8265"], ("address=127.0.0.1:8265", "such as http://HOST:8265")),
    (["submit", "good.yaml", "--address", "ray://127.0.0.1:10001"], ("address=ray://127.0.0.1:10001", "such as http://HOST")),
    (["submit", "good.yaml", "--address", "http://[::1"], ("address=http://[::1", "such as http://HOST")),
    (["submit", "good.yaml", "--address", ""], ("address=''", "such as http://HOST")),
    (["submit", "absent.yaml", "--address", "http://127.0.0.1:9"], ("recipe=absent.yaml", "No such file")),
    (["generate", "absent"], ("arguments=absent", "required: --prompt")),
    (["generate", "absent", "--prompt", "x", "--temperature", "hot"], ("--temperature=hot", "must be a number")),
    (["generate", "absent", "--prompt", "x", "--tokens", "1.5"], ("--tokens=1.5", "must be a whole number")),
    (["eval", "absent"], ("arguments=absent", "required: FILE")),
    (["status"], ("arguments=nothing", "required: RUN")),
    (["status", "absent"], ("RUN=absent", "has no run.json")),
    (["health"], ("arguments=nothing", "required: RUN")),
    (["health", "absent"], ("RUN=absent", "has no metrics.jsonl")),
    (["completion"], ("arguments=nothing", "required: shell")),
    (["train", "quikstart"], ("recipe=quikstart", "did you mean 'quickstart'?", "legal: disaggregated, ")),
    (["completion", "tcsh"], ("shell=tcsh", "is not known", "legal: bash, zsh, fish")),
]


@pytest.mark.parametrize(("arguments", "fragments"), COMMANDS, ids=[" ".join(words) or "nothing" for words, _ in COMMANDS])
def test_commands_and_options(refused: Refused, arguments: list[str], fragments: tuple[str, ...]) -> None:
    said(refused(*arguments), *fragments)


FILES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("recipe=empty", "must be a mapping of sections; legal: name, model")),
    "comments": (b"# nothing\n", ("recipe=comments", "must be a mapping of sections")),
    "list": (b"- model\n- data\n", ("recipe=list", "must be a mapping of sections")),
    "word": (b"model\n", ("recipe=word", "must be a mapping of sections")),
    "unclosed": (b"model: [\n", ("recipe=unclosed", "is not YAML", "line 2, column 1")),
    "tab": (b"\tmodel: x\n", ("recipe=tab", "is not YAML", "line 1, column 1")),
    "json": (b'{"model": {"preset": "tiny"}', ("recipe=json", "is not YAML", "line 1")),
    "bytes": (bytes(range(128, 256)), ("recipe=bytes", "is not UTF-8 text", "can't decode byte 0x80")),
    "utf-16": ("model: x\n".encode("utf-16"), ("recipe=utf-16", "is not UTF-8 text")),
    "zero": (b'name: "a\\0b"\n', ("recipe=zero", "a zero byte in line 1")),
    "deep": (b"[" * 2000, ("recipe=deep", "is not YAML", "nested deeper than 40 levels in line 1")),
    "several": (b"model: {preset: tiny}\n---\nname: x\n", ("recipe=several", "is not YAML", "another document")),
    "twice": (
        b"model: {preset: tiny}\nmodel: {preset: tiny}\n",
        ("recipe=twice", "'model' appears twice, the second time in line 2"),
    ),
    "code": (b"name: !!python/name:os.system\n", ("recipe=code", "is not YAML", "python/name:os.system")),
    "no-date": (b"name: 2026-13-45\n", ("recipe=no-date", "is not YAML", "month must be in 1..12")),
    "no-model": (b"name: x\n", ("model=nothing", "is required")),
    "model-alone": (b"model:\n", ("model=null", "is a section", "legal: preset, layers")),
    "model-word": (b"model: tiny\n", ("model=tiny", "is a section", "legal: preset, layers")),
    "section-alone": (b"model: {preset: tiny}\ntraining:\n", ("training=null", "is a section", "legal: steps, stop_after")),
    "number-key": (b"model: {preset: tiny, 3: 4}\n", ("model.3=3", "is not a known key; legal: preset")),
    "no-sizes": (b"model: {layers: 2}\n", ("model.hidden=nothing", "is required")),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_recipe(refused: Refused, here: Path, name: str) -> None:
    content, fragments = FILES[name]
    (here / name).write_bytes(content)
    said(refused("train", name), *fragments)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("absent.yaml", "No such file or directory"),
        ("folder", "Is a directory"),
        ("good.yaml/recipe.yaml", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("", "Is a directory"),
    ],
)
def test_recipes_that_cannot_be_read(refused: Refused, path: str, reason: str) -> None:
    said(refused("train", path), f"recipe={path[:70]}", "cannot be read", reason)


# Overrides with two spaces between them, the beginning of the line, and other parts of the line.
OVERRIDES: list[tuple[str, str, tuple[str, ...]]] = [
    # not an override, or an override of no key
    ("training..steps=3", "override=training..steps=3", ("must read key.sub=value",)),
    (".training=3", "override=.training=3", ("must read key.sub=value",)),
    # values that are not YAML
    ("name='", "name='", ("is not a YAML value",)),
    ("name=2026-13-45", "name=2026-13-45", ("is not a YAML value",)),
    ("name=!!bool perhaps", "name=!!bool perhaps", ("is not a YAML value",)),
    ("data={path: a, path: b}", "data={path: a, path: b}", ("is not a YAML value",)),
    (f"training.steps={DIGITS}", "training.steps=99999", ("is not a YAML value",)),
    # wrong types
    ("training.steps=1e3", "training.steps=1e3", ("is not a valid integer",)),
    ("training.steps=true", "training.steps=true", ("is not a valid number",)),
    ("optimizer.clip=yes", "optimizer.clip=true", ("is not a valid number",)),
    ("optimizer.lr=fast", "optimizer.lr=fast", ("is not a valid number",)),
    ("optimizer.betas=0.9", "optimizer.betas=0.9", ("is not a list",)),
    ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas=[0.9, 0.9, 0.9]", ("at most 2 items",)),
    ("name=3", "name=3", ("is not a text",)),
    ("cluster.storage=[a]", "cluster.storage=['a']", ("is not a text",)),
    # out of range
    ("training.seed=4294967296", "training.seed=4294967296", ("must be less than 4294967296",)),
    ("cluster.workers=999999999999", "cluster.workers=999999999999", ("must be less than or equal to 131072",)),
    (f"name={'n' * 101}", f"name={'n' * 70}", ("at most 100 characters",)),
    ("tracking.experiment=''", "tracking.experiment=''", ("at least 1 character",)),
    # values that do not fit together
    ("fold.cp=2  data.seq_len=130", "data.seq_len=130", ("must be a multiple of 4", "legal: 128, 132")),
]


@pytest.mark.parametrize(("overrides", "given", "fragments"), OVERRIDES, ids=[overrides[:60] for overrides, *_ in OVERRIDES])
def test_overrides(refused: Refused, overrides: str, given: str, fragments: tuple[str, ...]) -> None:
    said(refused("train", "good.yaml", *overrides.split("  ")), f"foldray: {given}", *fragments)


EXPLAIN: list[tuple[str, tuple[str, ...]]] = [
    ("", ("arguments=nothing", "required: --world-size")),
    ("--world-size eight", ("--world-size=eight", "must be a whole number")),
    ("--world-size 8 --tp 1.5", ("--tp=1.5", "must be a whole number")),
    ("--world-size 8 --dp 2", ("argument=--dp", "is not known to foldray explain", "legal: --help, --json, --world-size, --tp")),
    ("--world-size 8 more", ("world_size=8", "is for a fold without a recipe; more has a fold of its own")),
    ("good.yaml --ep 2", ("ep=2", "is for a fold without a recipe")),
    ("--world-size 8 --cluster 3,4", ("cluster=3 4", "have room for 7 of 8 ranks")),
    ("--world-size 8 --cluster 99999999x8", ("cluster=99999999x8", "at most 131072 nodes")),
    ("--world-size 4096 --cluster h200", ("world_size=4096", "at most 2048 ranks are put on nodes")),
    ("--world-size 8 --cluster eos", ("cluster=eos", "is no known cluster nor a YAML file", "eos-h100")),
    ("--world-size 8 --cluster 3,5 --ranks-per-node 4", ("cluster=3,5", "leave out --ranks-per-node")),
    ("--world-size 8 --cluster 3,5 --best-order", ("best_order=asked for", "needs --ranks-per-node")),
    ("--world-size 8 --ranks-per-node 0", ("ranks_per_node=0", "must be at least 1")),
    ("--world-size 8 --ranks-per-node four", ("--ranks-per-node=four", "must be a whole number")),
    ("--world-size 8 --best-order", ("best_order=asked for", "needs --ranks-per-node")),
    ("--world-size 8 --json --best-order", ("best_order=asked for", "needs --ranks-per-node")),
    ("--world-size 8 --picture fold.pdf", ("picture=fold.pdf", "must end in .png")),
    (
        "--world-size 8 --picture absent/fold.png",
        ("picture=absent/fold.png", "cannot be written (the folder absent does not exist)"),
    ),
    ("--world-size 8 --ranks-per-node 0 --picture fold.png", ("ranks_per_node=0",)),
]
ILLEGAL: list[tuple[str, tuple[str, ...]]] = [
    ("--world-size 0", ("world_size=0", "at least 1")),
    ("--world-size 99999999999999", ("world_size=99999999999999", "at most 131072 ranks")),
    ("--world-size 8 --tp 0", ("tp=0", "at least 1", "nearest legal folds: tp=1")),
    ("--world-size 8 --ep 3", ("fold=1·3·1", "etp·ep·pp must divide the world size 8", "nearest legal folds:", "ep=4")),
    ("--world-size 8 --tp 3 --pp 2", ("fold=3·1·2", "tp·cp·pp must divide the world size 8", "nearest legal folds:")),
    ("--world-size 8 --order tp-cp-dp-pp-pp", ("order=tp-cp-dp-pp-pp", "must name each of tp-cp-dp-pp once")),
    ("--world-size 8 --moe-order tp-cp-dp-pp", ("moe_order=tp-cp-dp-pp", "must name each of etp-ep-edp-pp once")),
    (
        "--world-size 8 --pp 2 --order pp-tp-cp-dp",
        (
            "order=pp-tp-cp-dp | etp-ep-edp-pp: the pipeline groups must have the same members in both views",
            "attention has [0 1], the experts [0 4]; legal: tp-cp-dp-pp | etp-ep-edp-pp",
        ),
    ),
    ("--world-size 8 --pp 2 --ep 4 --moe-order pp-etp-ep-edp", ("attention has [0 4], the experts [0 1]",)),
    ("--world-size 8 --tp 3 --ep 3 --ranks-per-node 4 --best-order --picture fold.png", ("fold=3·1·1", "nearest legal folds:")),
]


@pytest.mark.parametrize(
    ("arguments", "fragments"), EXPLAIN + ILLEGAL, ids=[words or "nothing" for words, _ in EXPLAIN + ILLEGAL]
)
def test_explain(refused: Refused, arguments: str, fragments: tuple[str, ...]) -> None:
    said(refused("explain", *arguments.split()), *fragments)


@pytest.mark.parametrize(("arguments", "fragments"), ILLEGAL, ids=[words for words, _ in ILLEGAL])
def test_an_illegal_fold_is_one_json_document(outcome: Outcome, arguments: str, fragments: tuple[str, ...]) -> None:
    out, line = outcome("explain", "--json", *arguments.split())
    said(line, *fragments)
    document = json.loads(out)
    assert document["legal"] is False
    assert document["rule"] in line
    for fold in document["nearest"]:
        sizes = {key: size for key, size in fold.items() if key not in ("dp", "edp")}
        assert str(Fold(8, **sizes)).startswith(f"TP{fold['tp']} CP{fold['cp']} DP{fold['dp']} PP{fold['pp']} | ")
        assert ("order" in fold) == line.startswith(("foldray: order=", "foldray: moe_order="))
        assert fold["tp"] * fold["cp"] * fold["dp"] * fold["pp"] == 8
        assert fold["etp"] * fold["ep"] * fold["edp"] * fold["pp"] == 8


@pytest.mark.parametrize(
    "arguments",
    [
        "explain --json",
        "explain --json --world-size eight",
        "train --json",
        "train --json absent.yaml",
        "train good.yaml --json fold.ep=3",
        "train good.yaml training.steps=many --json",
        "submit good.yaml --json",
        "submit good.yaml --json --address nonsense",
    ],
)
def test_json_leaves_standard_output_empty_when_refused(refused: Refused, arguments: str) -> None:
    refused(*arguments.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "train good.yaml training.steps=20 training.steps=30 --resume r --json",
        "train --resume r --json good.yaml training.steps=20 training.steps=30",
        "train good.yaml training.steps=20 --resume r training.steps=30 --json",
        "train good.yaml --json training.steps=20 --resume r training.steps=30",
        "train --json good.yaml --resume=r training.steps=20 training.steps=30",
    ],
)
def test_options_and_overrides_stand_in_any_order(here: Path, trained: Trained, arguments: str) -> None:
    assert main(arguments.split()) == 0
    assert [recipe.training.steps for recipe in trained.recipes] == [30]
    assert trained.options == [{"resume": "r", "start": None, "as_json": True, "search": None}]


def test_a_checkpoint_to_begin_at(here: Path, trained: Trained) -> None:
    assert main(["train", "good.yaml", "--from", "s3://runs/r/step_00000010"]) == 0
    assert trained.options == [{"resume": None, "start": "s3://runs/r/step_00000010", "as_json": False, "search": None}]


def test_the_address_goes_into_the_recipe(here: Path, trained: Trained) -> None:
    assert main(["train", "good.yaml", "--address", "head:6379"]) == 0
    assert trained.recipes[0].cluster.address == "head:6379"


def test_an_interrupt_is_no_traceback(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "trainers.driver.entry", SimpleNamespace(train=interrupted))
    assert main(["train", "good.yaml"]) == 130
    assert capsys.readouterr() == ("", "foldray: interrupted\n")


def test_a_legal_fold_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--world-size", "8", "--ep", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["legal"], err) == (True, "")
    assert not {"placement", "best"} & set(json.loads(out))


def explained(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert main(["explain", *arguments.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_explain_draws_both_grids_and_lists_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained(capsys, "--world-size 8 --tp 2 --cp 2 --ep 8 --ranks-per-node 4").splitlines()
    assert lines[0] == "8 ranks, 4 per node: TP2 CP2 DP2 PP1 | ETP1 EP8 EDP1"
    assert "dp0 │   0   1 │   2   3 │ node 0    │   0   1   2   3┃  4   5   6   7 │ nodes 0–1" in lines
    families = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  ") and " of " in line}
    assert families["tp"] == "4 groups of 2 inside a node [0 1] [2 3] [4 5] [6 7]"
    assert families["dp"] == "4 groups of 2 crosses 2 nodes (100% of pairs) [0 4] [1 5] [2 6] [3 7]"
    assert families["ep"] == "1 group of 8 crosses 2 nodes (57% of pairs) [0 1 2 3 4 5 6 7]"
    assert families["edp"] == "8 groups of 1"
    assert list(families) == [
        "tp",
        "cp",
        "dp",
        "pp",
        "dp_cp",
        "tp_cp",
        "tp_dp_cp",
        "world",
        "embedding",
        "etp",
        "ep",
        "edp",
        "etp_ep",
    ]
    assert lines[-1].startswith("score: 5.90476")


def test_explain_without_nodes_speaks_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    out = explained(capsys, "--world-size 8 --tp 4 --etp 2 --ep 4")
    said(out, "8 ranks: TP4 CP1 DP2 PP1 | ETP2 EP4 EDP1", "dp1 │   4   5   6   7 │   ep1 │    2    3 │")
    assert "node" not in out
    assert "score" not in out


def test_explain_finds_the_best_order(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--world-size 8 --tp 2 --ep 2 --ranks-per-node 2 --best-order"
    said(
        explained(capsys, f"{asked} --order dp-cp-tp-pp"),
        "score: 19.3333",
        "--order tp-cp-dp-pp --moe-order etp-ep-edp-pp, score 4\n",
    )
    said(explained(capsys, asked), "score: 4 ", "best order: this one")


def test_placement_and_best_order_are_in_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--world-size 8 --tp 2 --ep 2 --order dp-cp-tp-pp --ranks-per-node 2 --json"
    placement = json.loads(explained(capsys, arguments))["placement"]
    assert placement.keys() == {"ranks_per_node", "nodes", "score", "families"}
    assert (placement["ranks_per_node"], placement["nodes"]) == (2, 4)
    assert placement["families"]["tp"] == {"crossing": 1.0, "spans": 2, "inside": False}
    assert placement["families"]["ep"] == {"crossing": 0.0, "spans": 1, "inside": True}
    document = json.loads(explained(capsys, f"{arguments} --best-order"))
    assert document["placement"] == placement
    assert document["best"] == {"order": "tp-cp-dp-pp", "moe_order": "etp-ep-edp-pp", "score": 4}
    assert set(document["attention"]["groups"]) | set(document["moe"]["groups"]) == set(placement["families"])


def test_explain_puts_ranks_on_the_nodes_of_a_cluster(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--world-size 8 --tp 2 --ep 4 --order dp-cp-tp-pp --cluster"
    out = explained(capsys, f"{asked} 3,5 --picture fold.png")
    said(
        out,
        "8 ranks, on 2 nodes",
        "node 0  3      0–2             0–1 4\n",
        "12 (75%)        3 of 4 groups  4 (25%)           1 of 4 groups",
    )
    said(out, "by traffic, 35% less crosses nodes\n")
    assert (here / "fold.png").exists()
    said(explained(capsys, f"{asked} 2x4"), "node 1  4      4–7 ")
    said(explained(capsys, "--world-size 16 --tp 2 --cluster h200"), "node 1  8      8–15", "ranks in order are as good as any")
    assert main(["explain", *asked.split(), "0x8"]) == 2
    assert capsys.readouterr().err == "foldray: cluster=0x8: has no node\n"


def test_explain_knows_the_bytes_of_a_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seats = json.loads(explained(capsys, "good.yaml cluster.workers=4 fold.tp=2 fold.ep=2 --cluster 1,2,1 --json"))["seats"]
    assert seats["unit"] == "bytes"
    assert [node["before"] for node in seats["nodes"]] == [[0], [1, 2], [3]]
    assert [node["seats"] for node in seats["nodes"]] == [1, 2, 1]
    tp = seats["families"]["tp"]
    assert (tp["before"]["groups"], tp["before"]["crossing"], tp["after"]["crossing"]) == (2, 2, 1)
    assert tp["before"]["across"] == 2 * tp["after"]["across"] == tp["after"]["across"] + tp["after"]["inside"]
    assert seats["across"]["after"] == sum(each["after"]["across"] for each in seats["families"].values())


def test_explain_draws_a_picture(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explained(capsys, "--world-size 8 --tp 2 --ep 8 --ranks-per-node 4 --picture fold.png")
    assert (here / "fold.png").read_bytes().startswith(b"\x89PNG")
    json.loads(explained(capsys, "--world-size 8 --json --picture other.PNG"))
    assert (here / "other.PNG").exists()


def test_a_picture_needs_matplotlib(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trainers.pictures.fold", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoMatplotlib(), *sys.meta_path])
    line = refused("explain", "--world-size", "8", "--picture", "fold.png")
    said(line, "picture=fold.png: needs the package 'matplotlib'", "pip install matplotlib")


class _NoMatplotlib:
    """A finder that makes matplotlib look as if it were not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_explain_needs_no_torch_and_survives_a_reader_that_goes(tmp_path: Path) -> None:
    source = """
        import os, sys
        from foldray.cli import main
        code = main(["explain", "--world-size", "64", "--ep", "8", "--ranks-per-node", "8", "--best-order", "--picture", "f.png"])
        print(code, "torch" in sys.modules, "ray" in sys.modules)
        sys.stdout.flush()
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        os.close(writer)
        print(main(["explain", "--world-size", "64"]), file=sys.stderr)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(source)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (process.returncode, process.stdout.splitlines()[-1], process.stderr) == (0, "0 False False", "0\n")


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ("--help", ["train", "submit", "verify", "explain"]),
        ("verify --help", ["RECIPE", "key=value", "--shrink", "--address", "--json"]),
        (
            "train --help",
            ["RECIPE", "key=value", "--resume", "--json", *(key for key, *_ in describe(Recipe) if not key.startswith("tune."))],
        ),
        ("tune --help", ["RECIPE", "--json", *(key for key, *_ in describe(Recipe) if key.startswith("tune."))]),
        ("dashboard --help", ["RECIPE", "--host", "--port"]),
        ("submit --help", ["--address", "http://HOST:8265"]),
        (
            "generate --help",
            ["RUN", "--prompt TEXT", "--tokens", "--temperature", "--top-p", "--top-k", "--seed", "separator", "--chat"],
        ),
        ("eval --help", ["RUN", "FILE", "--seq-len", "the first token of a file from the separator", "Bits per byte"]),
        (
            "explain --help",
            ["--world-size", "--moe-order", "etp-ep-edp-pp", "--ranks-per-node", "--best-order", "--picture FILE.png"],
        ),
    ],
)
def test_help_can_be_read(capsys: pytest.CaptureFixture[str], arguments: str, mentions: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    said(out, *mentions)
    assert max(map(len, out.split("\n"))) <= 130
    # The help has no names of Python types.
    for word in ("typing", "<class", "NoneType", "tuple", "%("):
        assert word not in out


def test_from_the_shell(tmp_path: Path) -> None:
    """Run the command as a separate process. Check the exit code, and that no module prints during its import."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "foldray", "train", "absent.yaml"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    rule = "cannot be read (No such file or directory)"
    assert (process.returncode, process.stdout, process.stderr) == (2, "", f"foldray: recipe=absent.yaml: {rule}\n")
    assert not list(tmp_path.iterdir())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"foldray {foldray.__version__}\n"


def test_a_terminal_that_lacks_characters_fails_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of a week would have ended with exit code 1 because of its closing table."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert main(["slice", "--seq-len", "64", "--degree", "2", "--hidden", "64", "--heads", "4"]) == 0
    assert out.getvalue().count(b"?") > 10, "its bars"
