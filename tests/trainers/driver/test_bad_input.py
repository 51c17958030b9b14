"""Mistakes that only `foldray train` can find: each gives exit code 2 and one line, starts no worker, leaves no run."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import yaml
from ray.train.torch import TorchTrainer

from foldray.cli import main
from foldray.errors import UserError
from foldray.recipe import DataSpec, Recipe
from tests.trainers.driver.runs import STEPS, recipe
from trainers import FoldTrainer
from trainers.cluster import joining
from trainers.data.order import SampleOrder
from trainers.data.prepare import prepare
from trainers.driver import resuming
from trainers.sinks.mlflow_server import check_reachable

pytestmark = pytest.mark.usefixtures("ray_session")

Refused = Callable[..., str]
LAST = f"step_{STEPS:08d}"


def write(folder: Path, **files: bytes | str) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture(scope="module")
def place(storage: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, good texts, and all kinds of files that cannot be trained on."""
    place = tmp_path_factory.mktemp("place")
    longer = recipe(storage, engine={"kind": "torch"}, training={"steps": 2 * STEPS}, cluster={"max_failures": 0})
    (place / "recipe.yaml").write_text(yaml.safe_dump(longer.model_dump(mode="json", exclude_defaults=True)))
    (place / "file").write_text("a file")
    write(place / "texts", **{name: "".join(f"{name} is not {i * i}. " for i in range(500)) for name in "abcd"})
    write(place / "more", **{name: "".join(f"{name} may be {i * i}. " for i in range(500)) for name in "abcd"})
    write(place / "empty", a="", b="", c="")
    write(place / "short", a="short", b="short", c="short")
    write(place / "binary", **{name: bytes(range(256)) * 100 for name in "abc"})
    write(place / "partly", a="text " * 1000, b="text " * 1000, z=b"\x7fELF\0\0")
    good = '{"text": "some text that is long enough"}\n'
    write(place / "torn", a=good * 99 + '{"text": \n', b=good * 9)
    write(place / "untold", a=good * 99 + '{"txt": "text"}\n', b=good * 9)
    return place


@pytest.fixture
def runs(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for runs, which does not exist yet. The current folder is `place`."""
    monkeypatch.chdir(place)
    return tmp_path / "runs"


@pytest.fixture
def refused(runs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """`refused(*overrides)` runs a training that must be refused, and returns its line of error."""
    attempts = list[Any]()
    monkeypatch.setattr(TorchTrainer, "fit", attempts.append)

    def run(*overrides: str, command: tuple[str, ...] = ("train", "recipe.yaml")) -> str:
        capfd.readouterr()
        code = main([*command, f"cluster.storage={runs}", *overrides])
        _, line = capfd.readouterr()
        print(line, end="")
        assert code == 2
        assert not attempts, "workers were started"
        assert line.startswith("foldray: ")
        assert line.endswith("\n")
        assert line.count("\n") == 1
        assert "Traceback" not in line
        # Complete packed data may stay, because the corrected recipe can use it. A run or its tracking must not.
        left = [path.relative_to(runs) for path in runs.glob("*/*")] if runs.exists() else []
        assert all(re.fullmatch(r"data/[0-9a-f]{16}", str(path)) for path in left)
        assert not [path for path in runs.glob("*") if path.name != "data"]
        return line

    return run


DATA: list[tuple[str, tuple[str, ...]]] = [
    ("data.path=/nowhere/a.txt", ("data.path=/nowhere/a.txt", "matches no file")),
    ("data.path=~nobody-of-this-name/a", ("data.path=~nobody-of-this-name/a", "matches no file")),
    (f"data.path={'x' * 4000}", ("data.path=xxx", "matches no file")),
    ("data.path=empty/*", ("data.seq_len=32", "needs 33 tokens, but the training documents have 0")),
    ("data.path=short/*", ("data.seq_len=32", "needs 33 tokens, but the training documents have 12")),
    ("data.validation.path=short/*", ("data.seq_len=32", "needs 33 tokens, but the validation documents have 18")),
    ("data.seq_len=16777216", ("data.seq_len=16777216", "but the training documents have")),
    ("data.path=binary/*", ("data.path=", "/binary/", "is not UTF-8 text", "zero bytes")),
    ("data.path=partly/*", ("data.path=", "/partly/z", "is not UTF-8 text", "zero bytes")),
    ("data.path=texts/a", ("data.validation.path=null", "must name a validation set", "data.path is one file, a")),
    ("data.validation.path=/nowhere/*", ("data.validation.path=/nowhere/*", "matches no file")),
    ("data.path=texts/*  data.validation.path=texts/*", ("data.validation.path=texts/*", "nothing is left to train on")),
    ("data.source=jsonl  data.path=torn/*", ("data.path=", "/torn/a", "line 100 is not JSON")),
    ("data.source=jsonl  data.path=untold/*", ("data.text_field=text", "is not a field of line 100", "/untold/a", "legal: txt")),
    ("data.source=jsonl", ("data.path=", "/texts/", "line 1 is not JSON")),
    ("data.source=parquet", ("data.path=", "/texts/", "is not Parquet")),
    ("model.vocab=100", ("model.vocab=100", "must be at least 257, the ids of data.tokenizer=byte")),
    ("data.tokenizer=/nowhere", ("data.tokenizer=/nowhere", "this folder does not exist")),
    ("data.cache=file", ("data.cache=", "/file", "cannot be written (Not a directory)")),
    ("data.tokenizer=~nobody-of-this-name", ("data.tokenizer=~nobody-of-this-name", "this folder does not exist")),
    (f"data.tokenizer={'x' * 300}", ("data.tokenizer=xxx", "this folder does not exist")),
    (f"data.cache={'x' * 300}", ("data.cache=", "cannot be written (File name too long)")),
    ("data.cache=/proc/foldray", ("data.cache=/proc/foldray", "cannot be written")),
]
STORAGE: list[tuple[str, tuple[str, ...]]] = [
    ("cluster.storage=file", ("cluster.storage=", "/file:", "is not a writable folder (Not a directory)")),
    ("cluster.storage=file/runs", ("cluster.storage=", "/file/runs:", "is not a writable folder (Not a directory)")),
    ("cluster.storage=/proc/foldray/runs", ("cluster.storage=/proc/foldray/runs", "is not a writable folder")),
    (f"cluster.storage={'x' * 300}", ("cluster.storage=/", "(File name too long)")),
    (
        "cluster.storage=s3://runs/x?endpoint_override=127.0.0.1:9&scheme=http&region=x",
        ("cluster.storage=s3://runs/x?endpoint_override=127.0.0.1:9", "is not a storage that can be reached and written to"),
    ),
]
TRACKING: list[tuple[str, tuple[str, ...]]] = [
    ("tracking.uri=http://127.0.0.1:9", ("tracking.uri=http://127.0.0.1:9", "Connection refused", "legal: sqlite:///")),
    ("tracking.uri=postgresql://127.0.0.1:9/db", ("tracking.uri=postgresql://127.0.0.1:9/db", "Connection refused")),
    ("tracking.uri=sqlite://db", ("tracking.uri=sqlite://db", "three slashes")),
    ("tracking.uri=sqlite:///file/db", ("tracking.uri=sqlite:////", "/file/db", "cannot be used for MLflow tracking")),
]
CLUSTER: list[tuple[str, tuple[str, ...]]] = [
    (
        "model.vocab=16000000  model.hidden=100000",
        ("model=3.2e+12 parameters", "2 workers need", "TiB for weights, gradients and optimizer, but the cluster has"),
    ),
    ("cluster.workers=8  training.global_batch=16", ("cluster.workers=8", "has room for 2 workers of 1 CPU", "legal: 1 to 2")),
    ("cluster.workers=131072  training.global_batch=262144", ("cluster.workers=131072", "has room for 2 workers", "1 to 2")),
    ("cluster.cpus_per_worker=2", ("cluster.workers=2", "has room for 1 workers of 2 CPU", "legal: 1 to 1")),
    ("cluster.cpus_per_worker=64", ("cluster.workers=2", "has room for 0 workers of 64 CPU")),
    ("cluster.placement=STRICT_SPREAD", ("cluster.workers=2", "on 1 node(s), placed STRICT_SPREAD", "legal: 1 to 1")),
]
ALL = DATA + STORAGE + TRACKING + CLUSTER


@pytest.mark.gate(24)
@pytest.mark.parametrize(("overrides", "fragments"), ALL, ids=[overrides[:50] for overrides, _ in ALL])
def test_what_cannot_be_trained(refused: Refused, overrides: str, fragments: tuple[str, ...]) -> None:
    line = refused(*overrides.split("  "))
    for fragment in fragments:
        assert fragment in line


def test_a_gpu_where_there_is_none(refused: Refused) -> None:
    if ray.cluster_resources().get("GPU"):
        pytest.skip("there are GPUs")
    assert "cluster.gpu=true: none of the cluster's 1 node(s) has a GPU; legal: false" in refused("cluster.gpu=true")


@pytest.mark.parametrize(
    ("overrides", "package", "fragments"),
    [
        ("moe.backend=tutel", "tutel", ("moe.backend=tutel", "'tutel', which is not installed", "pip install")),
        ("moe.backend=deepspeed", "deepspeed", ("moe.backend=deepspeed", "'deepspeed', which", "pip install deepspeed")),
        ("engine.kind=deepspeed", "deepspeed", ("engine.kind=deepspeed", "'deepspeed', which", "pip install deepspeed")),
    ],
)
def test_a_package_that_is_not_there(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, overrides: str, package: str, fragments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # with None, an import of the module fails
    line = refused(overrides)
    for fragment in fragments:
        assert fragment in line


class _Talker(BaseHTTPRequestHandler):
    """A web server that is neither Ray nor MLflow."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    """HOST:PORT of a web server that is neither Ray nor MLflow."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Talker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """HOST:PORT of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("127.0.0.1:9", marks=pytest.mark.nightly("waits as long as for a user")),
        "no.such.host.invalid:6379",
        "stranger",
        "silent",
        "ray://stranger",
        "http://stranger",
    ],
)
def test_an_address_without_a_cluster(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, stranger: str, silent: str, where: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # otherwise the session's cluster is used
    if where != "127.0.0.1:9":  # this address waits as long as in a user's run
        monkeypatch.setattr(joining, "_ANSWER_S", 1.0)
    where = where.replace("stranger", stranger).replace("silent", silent)
    line = refused("--address", where)
    assert f"cluster.address={where}: no Ray cluster answers there" in line
    assert "(no answer in " in line
    assert "HOST:PORT" in line


def test_an_address_with_a_cluster() -> None:
    joining._knock(ray.get_runtime_context().gcs_address)


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "postgresql://127.0.0.1:9/db"])
def test_a_dead_tracking_server_is_refused_before_the_data_are_read(refused: Refused, runs: Path, uri: str) -> None:
    assert "Connection refused" in refused(f"tracking.uri={uri}", "data.path=/nowhere/*")
    assert not runs.exists()


def test_behind_a_proxy_the_tracking_server_itself_need_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.parse({"model": {"preset": "tiny"}, "tracking": {"uri": "http://mlflow.invalid"}})
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="cannot be used for MLflow tracking"):
        check_reachable(recipe)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    check_reachable(recipe)
    monkeypatch.setenv("no_proxy", "mlflow.invalid")
    with pytest.raises(UserError, match="cannot be used for MLflow tracking"):
        check_reachable(recipe)


def test_a_tracking_server_that_is_none(refused: Refused, stranger: str) -> None:
    assert f"tracking.uri=http://{stranger}: cannot be used for MLflow tracking" in refused(f"tracking.uri=http://{stranger}")


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("http://127.0.0.1:9", "Failed to connect to Ray at address: http://127.0.0.1:9"),
        ("http://no.such.host.invalid:8265", "Failed to connect to Ray"),
        ("http://127.0.0.1:port", "address of the cluster's dashboard, such as http://HOST:8265"),
        ("http://stranger", "the server there is not a Ray dashboard"),
    ],
)
def test_a_job_for_nobody(refused: Refused, stranger: str, where: str, reason: str) -> None:
    where = where.replace("stranger", stranger)
    line = refused(command=("submit", "recipe.yaml", "--address", where))
    assert f"address={where}: " in line
    assert reason in line


def test_json_leaves_standard_output_empty(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for overrides in (["data.path=/nowhere/a"], ["data.path=short/*"], ["tracking.uri=http://127.0.0.1:9"]):
        assert main(["train", "recipe.yaml", "--json", f"cluster.storage={runs}", *overrides]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.split("\n")[-2].startswith("foldray: ")


@pytest.fixture(scope="module")
def finished(whole: FoldTrainer) -> Path:
    """The folder of a successful run, whose recipe is that of `place` with half of its steps."""
    assert whole.run is not None
    return whole.run.folder.path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


BEGIN: list[tuple[str, tuple[str, ...]]] = [
    ("model.hidden=64", ("resume=RUN", "embedding.weight is 264×32, but this recipe's is 264×64")),
    ("model.layers=3", ("resume=RUN", "blocks.2.attention_norm.weight is missing, but this recipe's is 32")),
    ("model.layers=1", ("resume=RUN", "blocks.1.attention.key is 32×16, but this recipe's is missing")),
    ("training.seed=1", ("training.seed=1", "RUN takes its text in another order", "legal: 0")),
    ("training.global_batch=16", ("training.global_batch=16", "RUN takes its text in another order", "legal: ")),
    ("optimizer.kind=sgd  optimizer.momentum=0.9", ("optimizer.kind=sgd", "RUN has no optimizer state for it", "legal: adamw")),
    ("optimizer.kind=muon  engine.kind=torch", ("optimizer.kind=muon", "RUN has no optimizer state for it", "legal: adamw")),
]
RESUME: list[tuple[str, tuple[str, ...]]] = [
    ("data.path=more/*", ("resume=RUN", "was trained on other data", "a new run may have others: --from ")),
    ("data.seq_len=16", ("resume=RUN", "other sequence lengths")),
    *BEGIN,
]


@pytest.mark.gate(4)
@pytest.mark.parametrize(("overrides", "fragments"), RESUME, ids=[overrides for overrides, _ in RESUME])
def test_a_run_that_cannot_be_gone_on_with(refused: Refused, finished: Path, overrides: str, fragments: tuple[str, ...]) -> None:
    before = contents(finished)
    line = refused(f"cluster.storage={finished.parent}", "--resume", finished.name, *overrides.split("  "))
    for fragment in fragments:
        assert fragment.replace("RUN", finished.name) in line
    assert contents(finished) == before


@pytest.mark.gate(4)
@pytest.mark.parametrize(("overrides", "fragments"), BEGIN, ids=[overrides for overrides, _ in BEGIN])
def test_a_checkpoint_that_cannot_be_begun_at(
    refused: Refused, finished: Path, overrides: str, fragments: tuple[str, ...]
) -> None:
    before, start = contents(finished), finished / LAST
    line = refused("--from", str(start), *overrides.split("  "))
    for fragment in fragments:
        fragment = fragment.replace("resume=RUN", f"from={start}"[:79]).replace("RUN", f"checkpoint {start}")
        assert fragment in line
    assert contents(finished) == before


def test_where_no_run_can_begin(refused: Refused, finished: Path, tmp_path: Path) -> None:
    assert "from=/nowhere: is not a checkpoint's folder, or does not exist\n" in refused("--from", "/nowhere")
    assert "from=htp://x: is not a storage that can be reached" in refused("--from", "htp://x")
    assert f"from={tmp_path}"[:79] in (line := refused("--from", str(tmp_path)))
    assert "holds no checkpoint\n" in line
    line = refused("--from", str(finished))
    assert "holds no checkpoint; legal: " in line
    assert line.endswith(f"{finished}/{LAST}\n")
    start, steps = str(finished / LAST), f"training.steps={STEPS}"
    assert f"{steps}: the checkpoint has {STEPS} finished steps already" in refused("--from", start, steps)
    assert "training.stop_after=1: " in refused("--from", start, "training.stop_after=1")
    assert "not allowed with argument --resume" in refused("--resume", "a", "--from", start)


def moved(finished: Path, to: Path) -> Path:
    """Copy a run to another storage, where the test damages it."""
    shutil.copytree(finished.parent / "data", to / "data")
    return Path(shutil.copytree(finished, to / finished.name))


@pytest.mark.nightly("another training")
def test_damage_that_workers_find(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path, capfd) -> None:
    """Damage that the workers find is reported in one line, and Ray makes no other attempt."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(resuming, "_MOST_HASHED", 0)
    run = moved(finished, tmp_path)
    for earlier in sorted(run.glob("step_*"))[:-1]:
        shutil.rmtree(earlier)
    victim = run / LAST / "__1_0.distcp"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    capfd.readouterr()
    assert main(["train", "recipe.yaml", f"cluster.storage={tmp_path}", "--resume", run.name, "cluster.max_failures=3"]) == 2
    assert capfd.readouterr().err == (
        f"foldray: resume={run.name}: its checkpoint {LAST} is damaged: __1_0.distcp has other bytes than were written "
        "(its SHA-256 differs); the run has no earlier undamaged checkpoint\n"
    )
    records = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records.count("place") == 2 * len(("the first part of the run", "this one"))
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


FORGED = [
    ("run.json", "{", "its run.json cannot be read (Invalid JSON"),
    ("run.json", '{"mlflow_run_id": 3}', "its run.json cannot be read (mlflow_run_id: Input should be a valid string)"),
    ("run.json", '{"started_from": ["x"]}', "its run.json cannot be read (started_from: Input should be a valid string)"),
    ("metrics.jsonl", '{"kind": "step", "step": 1}\n', "its metrics.jsonl cannot be read (line 1 is not a record of a run)"),
    ("metrics.jsonl", "3\n", "its metrics.jsonl cannot be read (line 1 is not a record of a run)"),
]


@pytest.mark.parametrize(("file", "content", "fragment"), FORGED)
def test_a_forged_file_of_a_run(refused: Refused, finished: Path, tmp_path: Path, file: str, content: str, fragment: str) -> None:
    storage = tmp_path / "elsewhere"
    run = moved(finished, storage)
    (run / file).write_text(content)
    before = contents(storage)
    line = refused(f"cluster.storage={storage}", "--resume", run.name)
    assert f"resume={run.name}: {fragment}" in line
    assert contents(storage) == before


@pytest.mark.parametrize("resume", ["absent", "", "data", "../place", "mlflow.db"])
def test_a_run_that_is_not_there(refused: Refused, finished: Path, resume: str) -> None:
    line = refused(f"cluster.storage={finished.parent}", "--resume", resume)
    value = resume or "''"
    assert f"resume={value}: is not a run in {finished.parent}; legal: " in line


def test_a_run_where_there_are_none(refused: Refused, runs: Path) -> None:
    assert refused("--resume", "absent") == f"foldray: resume=absent: is not a run in {runs}\n"


@pytest.mark.nightly("another training; test_python.py has one that fails")
def test_a_failure_in_the_middle(place: Path, runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The third step has tokens beyond the vocabulary, which is not a user's mistake."""
    cache = f"data.cache={tmp_path / 'data'}"
    spec = Recipe.load("recipe.yaml", [cache])
    damage(spec.data, tmp_path / "data", samples=range(16, 24))
    capfd.readouterr()
    assert main(["train", "recipe.yaml", cache, f"cluster.storage={runs}"]) == 1
    out, line = capfd.readouterr()
    run = next(runs.glob("*/run.json")).parent
    reason = "IndexError: index out of range in self"
    # Both ranks fail. If the other one is first, Ray may end the first rank before its record of the second step has left.
    told = [f"foldray: training failed after step {step}: {reason}; the traceback is in {run / 'error.txt'}\n" for step in (1, 2)]
    assert line in told
    assert "status" in out
    text = (run / "error.txt").read_text()
    for fragment in ("driver\nTraceback", "in train_loop", "torch.embedding(", reason):
        assert fragment in text
    assert "rank 0\n" in text or "rank 1\n" in text, "both fail, and Ray tells of the first"
    assert "truncated" not in text.split("driver\n")[0]  # Ray's own message is truncated
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


def damage(spec: DataSpec, cache: Path, samples: range) -> None:
    """Prepare data, and put a token beyond the vocabulary into some samples of the seeded order."""
    data = prepare(spec, 264, cache)
    (work,) = data.folder.glob("train-*.tokens")
    tokens = np.memmap(work, data.meta["dtype"])
    for sequence in SampleOrder(0, len(data.train))(samples.start, samples.stop):
        tokens[sequence * spec.seq_len + 1] = 60_000
    tokens.flush()
