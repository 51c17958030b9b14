"""An exported model in lm-evaluation-harness: its log-likelihoods are those of `trainers.Model`. Needs `lm_eval[hf]`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from foldray.cli import main
from tests.trainers.hugging_face.test_export import make_run
from trainers import Model

QUESTIONS = [
    {"question": "2 times 3 is", "choices": ["6", "seven", "naïve"], "answer": 0},
    {"question": "def f(", "choices": ["x):", "y"], "answer": 1},
]
TEXT = "a text of few bytes, naïve"  # one window, of as many tokens as the model was trained with
CHOICE = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
          "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}]}  # fmt: skip
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
           "metric_list": [{"metric": "bits_per_byte"}]}  # fmt: skip


@pytest.fixture(scope="module")
def lm_eval() -> Any:
    if not all(map(find_spec, ("lm_eval", "accelerate"))):
        pytest.skip("needs lm-evaluation-harness")
    import lm_eval.tasks

    return lm_eval


@pytest.fixture(scope="module")
def place(lm_eval: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its export, and two tasks over local files."""
    folder = tmp_path_factory.mktemp("lm-eval")
    make_run(folder / "run", precision="float32")
    assert main(["export-hf", str(folder / "run" / "step_00000003"), str(folder / "out")]) == 0
    for name, task, rows in (("choice", CHOICE, QUESTIONS), ("rolling", ROLLING, [{"text": TEXT}])):
        file = folder / "tasks" / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(map(json.dumps, rows)))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        file.with_suffix(".yaml").write_text(yaml.safe_dump({"task": f"local_{name}", **data, **task}))
    return folder


@pytest.fixture
def evaluated(lm_eval: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a task on the exported model, and returns the results and the samples."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "cache"))

    def run(task: str, **model: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        tasks = lm_eval.tasks.TaskManager(include_path=str(place / "tasks"))
        given = {"pretrained": str(place / "out"), **model}
        found = lm_eval.simple_evaluate("hf", given, tasks=[task], task_manager=tasks, device="cpu", bootstrap_iters=0)
        return found["results"][task], found["samples"][task]

    return run


def test_choices_have_the_log_likelihoods_of_the_model(place: Path, evaluated: Any) -> None:
    """The exported tokenizer puts a separator in front of a question, as in training."""
    model = Model.load(place / "run" / "step_00000003", device="cpu")
    _, samples = evaluated("local_choice")
    for question, sample in zip(QUESTIONS, sorted(samples, key=lambda each: each["doc_id"]), strict=True):
        given = [model.tokenizer.separator, *model.tokenizer.encode(str(question["question"]))]
        for choice, (told, *_) in zip(question["choices"], [each[0] for each in sample["resps"]], strict=True):
            ids = model.tokenizer.encode(f" {choice}").tolist()
            logs = model.logits([*given, *ids]).log_softmax(-1)[len(given) - 1 : -1]
            assert float(told) == pytest.approx(sum(float(logs[i, token]) for i, token in enumerate(ids)), abs=1e-4)


def test_bits_per_byte_are_those_of_foldray_eval(place: Path, evaluated: Any) -> None:
    """Without `add_bos_token=False`, a second separator would be predicted, too."""
    score = Model.load(place / "run" / "step_00000003", device="cpu").evaluate(TEXT)
    assert score.tokens <= 32
    results, _ = evaluated("local_rolling", add_bos_token=False)
    assert results["bits_per_byte,none"] == pytest.approx(score.bits_per_byte, rel=1e-5)
    results, _ = evaluated("local_rolling")
    assert results["bits_per_byte,none"] > score.bits_per_byte * 1.01
