"""Training on a mixture of sources on Ray: what it reads, what it reports, and equal results after a stop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from foldray.cli import main
from foldray.errors import UserError
from foldray.recipe import Recipe
from tests.trainers.data.chats import CHATS, make_tokenizer
from tests.trainers.driver.runs import MODEL, fit, losses, recipe, same, weights, write_texts
from trainers.checkpoints.stored import look
from trainers.data.mixture import Mixture, opened
from trainers.data.prepare import prepare
from trainers.folders import Folder
from trainers.telemetry.records import averaged

pytestmark = pytest.mark.usefixtures("ray_session")
STEPS, STOP = 16, 7


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    write_texts(folder / "texts", 100)
    for name in ("few", "held"):  # a source that training sees several times
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"body": f"{name} {j} " * 5}) + "\n" for j in range(12)))
    with (folder / "few.jsonl").open("ab") as lines:
        lines.write(b'{"body": "not \xff UTF-8"}\n')
    return folder


def mixed(storage: Path, shares: tuple[float, float] = (0.75, 0.25), **sections: Any) -> Recipe:
    few = {
        "source": "jsonl",
        "path": f"{storage}/few.jsonl",
        "text_field": "body",
        "validation": {"path": f"{storage}/held.jsonl"},
    }
    sources = {"sums": {"path": f"{storage}/texts/*.txt", "weight": shares[0]}, "few": {**few, "weight": shares[1]}}
    data = {"source": "text", "path": None, "seq_len": 32, "validation": {"fraction": 0.3}, "invalid": "skip"}
    data["sources"] = sources
    training = {"steps": STEPS, "eval_sequences": 8, **sections.pop("training", {})}
    checkpoint = {"every": STOP, "keep": 3}
    return recipe(storage, data=data, engine={"kind": "torch"}, training=training, checkpoint=checkpoint, **sections)


@pytest.fixture(scope="module")
def whole(storage: Path, ray_session: None) -> Any:
    """An uninterrupted run."""
    return fit(mixed(storage))


def data_of(storage: Path, given: Recipe) -> Mixture:
    found = prepare(given.data, given.model.vocab, storage / "data")
    assert isinstance(found, Mixture)
    return found


@pytest.mark.nightly("another training")
def test_a_run_reports_every_source(storage: Path, whole: Any) -> None:
    history, data = whole.run.folder.history, data_of(storage, mixed(storage))
    assert len(data.parts["few"].train) < STEPS * 8 / 4 / 2  # more than two epochs
    last = history.validations[STEPS]
    assert list(last["sources"]) == ["sums", "few"]
    assert {key: last[key] for key in ("loss", "bits_per_byte", "sequences")} == averaged(list(last["sources"].values()), [3, 1])
    assert whole.run.summary.val_sources == last["sources"]
    assert last["sources"]["sums"]["sequences"] == min(8, len(data.parts["sums"].validation))
    told = json.loads((whole.run.folder.path / "run.json").read_text())
    assert told["val_sources"] == last["sources"]
    assert [told["data"][name]["unfit"]["documents"] for name in ("sums", "few")] == [0, 1]
    assert told["data"]["few"]["unfit"]["first"][0]["file"] == f"{storage}/few.jsonl"
    assert told["data"]["few"]["train"]["documents"] == 12
    assert whole.run.summary.bigram_bpb is not None


@pytest.mark.nightly("two trainings more")
def test_a_run_goes_on_at_the_same_sample(storage: Path, whole: Any) -> None:
    """Under the same fold, the results have the same bits."""
    first = fit(mixed(storage, training={"stop_after": STOP}))
    second = fit(mixed(storage), resume=first.run.folder.path.name)
    assert losses(second) == losses(whole)
    assert same(weights(second, STEPS), weights(whole, STEPS))
    stored = look(Folder(str(first.run.folder.path / f"step_{STOP:08d}"))).progress
    assert (stored.step, stored.data) == (STOP, data_of(storage, mixed(storage)).folder.name)


@pytest.mark.nightly("another training")
def test_another_fold_goes_on_at_the_same_sample(storage: Path, whole: Any) -> None:
    """The checkpoint knows nothing of the mixture but its step."""
    path = Path(shutil.copytree(whole.run.folder.path, storage / "other-fold"))
    for later in sorted(path.glob("step_*"))[1:]:
        shutil.rmtree(later)
    second = fit(mixed(storage, training={"stop_after": STOP + 3}, fold={"ep": 1, "tp": 2}), resume=path.name)
    assert losses(second)[: STOP + 3] == pytest.approx(losses(whole)[: STOP + 3], abs=1e-4)
    assert second.run.folder.history.resumes == [STOP]


@pytest.mark.nightly("another training")
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.75, 0.26)])
def test_other_weights_are_other_data(storage: Path, whole: Any, shares: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"^resume=.*: was trained on other data, other weights of sources, or other"):
        fit(mixed(storage, shares), resume=whole.run.folder.path.name)


def test_sources_are_prepared_once_for_all_weights(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = data_of(storage, mixed(storage))
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # preparing would fail
    other, same_ratio = (data_of(storage, mixed(storage, shares)) for shares in ((1, 1), (3, 1)))
    assert [part.folder for part in other.parts.values()] == [part.folder for part in before.parts.values()]
    assert other.folder != before.folder == same_ratio.folder
    (before.folder / "mixture.json").write_text("{}")
    assert data_of(storage, mixed(storage)).weights == (3, 1)


def test_conversations_mix_with_text(storage: Path) -> None:
    make_tokenizer(storage / "tokenizer")
    for name in ("chats", "other"):
        turns = [*CHATS.values(), *([CHATS[next(iter(CHATS))]] if name == "other" else [])]
        (storage / f"{name}.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    chats = {"source": "conversations", "path": f"{storage}/chats.jsonl", "validation": {"path": f"{storage}/other.jsonl"}}
    given = {
        "model": {**MODEL, "vocab": 1000}, "training": {"steps": 2},
        "data": {"tokenizer": f"{storage}/tokenizer", "seq_len": 64, "sources": {
            "sums": {"source": "text", "path": f"{storage}/texts/*.txt"}, "chats": chats,
        }},
    }  # fmt: skip
    parsed = Recipe.parse(given)
    data = data_of(storage, parsed)
    split = data.train
    rows = np.arange(len(split))
    trained, few = split.trained(rows), len(data.parts["sums"].train)
    assert split.masked
    assert parsed.data.mask_documents
    assert trained[:few].all()
    assert not trained[few:].all()
    assert data.parts["chats"].baselines() is None
    assert isinstance(opened(data.folder, ["a", "b"]), Mixture)


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda sources: sources["few"].update(path="nothing*"), "data.sources.few.path=nothing*: matches no file"),
    (lambda sources: sources["few"].update(text_field="text"), "data.sources.few.text_field=text: is not a field of line 1"),
    (lambda sources: sources["few"]["validation"].update(path=None), "data.sources.few.validation.path=null: must name a val"),
]


@pytest.mark.parametrize(("change", "line"), BAD, ids=[line for _, line in BAD])
def test_mistakes_name_the_source(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], Any], line: str
) -> None:
    given = mixed(storage).model_dump(mode="json")
    given["cluster"]["storage"] = str(tmp_path / "runs")
    change(given["data"]["sources"])
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(given))
    assert main(["train", str(tmp_path / "bad.yaml")]) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert told.startswith(f"foldray: {line}")


def test_a_source_without_enough_text_is_named(storage: Path) -> None:
    given = mixed(storage)
    data = given.data.model_copy(update={"seq_len": 2**15})
    with pytest.raises(UserError, match=r"^data.seq_len=32768: source sums: one sequence needs 32769 tokens"):
        prepare(data, given.model.vocab, storage / "data")
