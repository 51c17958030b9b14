"""Which recipe goes on from a checkpoint, without a training: what is refused, and what is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foldray.blueprint import parameter_table
from foldray.errors import UserError
from foldray.recipe import Recipe
from foldray.runtime import state_keys
from tests.trainers.data.test_packed import packed
from tests.trainers.driver.runs import recipe
from trainers.checkpoints.stored import Progress
from trainers.data.packed import PackedData
from trainers.driver.continuing import changes, check_resumable
from trainers.driver.resuming import Beginning
from trainers.folders import Folder
from trainers.sinks.run_folder import as_yaml

DATA: Any = SimpleNamespace(folder=Path("d"), content="same", parts={"": None})


@pytest.fixture
def before(tmp_path: Path) -> Recipe:
    """The recipe of a run, which lies in its folder."""
    made = recipe(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(as_yaml(made))
    return made


def changed(before: Recipe, **sections: Any) -> Recipe:
    given = before.model_dump(mode="json")
    for name, keys in sections.items():
        given[name] = {**given[name], **keys} if isinstance(keys, dict) else keys
    return Recipe.parse(given)


def stored(of: Recipe, **progress: Any) -> Any:
    """A checkpoint after step 40, as far as the checks look into it."""
    rows, about = parameter_table(of.model), {"seed": 0, "global_batch": 8, **progress}
    sizes = {f"model/{row.name}": row.shape for row in rows}
    sizes |= {f"optimizer/{row.name}/{key}": () for row in rows for key in state_keys(of.optimizer, row)}
    tensors = {name: SimpleNamespace(size=size) for name, size in sizes.items()}
    found = Progress(step=40, fold={}, validation={}, **{"data": "d", **about})
    return SimpleNamespace(progress=found, contents=SimpleNamespace(tensors=tensors))


def begin(tmp_path: Path, field: str = "resume") -> Beginning:
    return Beginning(field, "run", Folder(str(tmp_path / "run" / "step_00000040")))


KEPT: list[tuple[dict[str, Any], str]] = [
    ({"model": {"topk": 1}}, "model.topk=1: {} was trained with another value; keep it, or start a new run: --from ; legal: 2"),
    ({"model": {"norm_eps": 0.1}}, "model.norm_eps=0.1: "),
    ({"model": {"router": {"score": "sigmoid"}}}, "model.router.score=sigmoid: "),
    ({"model": {"windows": ["sliding:4"]}}, "model.windows=['sliding:4']: "),
    ({"model": {"rope_theta": 5e5}}, "model.rope_theta=500000.0: "),
    ({"model": {"rope_scaling": {"factor": 2.0, "original_positions": 32}}}, "model.rope_scaling="),
    ({"data": {"mask_documents": True}}, "data.mask_documents=True: "),
    ({"optimizer": {"kind": "sgd"}}, "optimizer.kind=sgd: "),
]


@pytest.mark.parametrize(("sections", "told"), KEPT, ids=[told.partition("=")[0] for _, told in KEPT])
def test_a_run_keeps_its_model_and_a_new_run_tells_of_another(
    before: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture, sections: dict[str, Any], told: str
) -> None:
    """None of these keys changes a shape."""
    now = changed(before, **sections)
    with pytest.raises(UserError) as refused:
        check_resumable(begin(tmp_path), stored(before), now, DATA)
    line = str(refused.value).replace(begin(tmp_path).folder.name, "")
    assert line.startswith(told.replace("{}", "run run"))
    assert not caplog.messages
    check_resumable(begin(tmp_path, "from"), stored(before), now, DATA)
    (line,) = caplog.messages
    assert line.startswith(f"checkpoint run: training goes on with other values: {told.partition('=')[0]}=")


def test_what_people_change_while_they_train_is_told(before: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = changed(
        before, model={"router": {"balance_scope": "global_batch"}}, optimizer={"lr": 1e-4, "clip": None}, training={"steps": 90},
        precision="bfloat16", fold={"ep": 1}, name="other", checkpoint={"every": 7},
    )  # fmt: skip
    check_resumable(begin(tmp_path), stored(before), now, DATA)
    assert caplog.messages == [
        "run run: training goes on with other values: model.router.balance_scope=global_batch (before: sequence), "
        "optimizer.lr=0.0001 (before: 0.003), optimizer.clip=null (before: 1.0), training.steps=90 (before: 60), "
        "precision=bfloat16 (before: float32)"
    ]
    caplog.clear()
    check_resumable(begin(tmp_path), stored(before), before, DATA)
    assert not caplog.messages


def test_keys_that_an_earlier_version_did_not_know_had_their_defaults(before: Recipe) -> None:
    written = before.model_dump(mode="json")
    for section, key in ((written["model"], "attention_sinks"), (written["model"]["router"], "scale"), (written, "moe")):
        del section[key]
    assert not list(changes(before, written))
    assert [each.key for each in changes(changed(before, model={"router": {"scale": 2.5}}), written)] == ["model.router.scale"]


def test_modules_that_a_recipe_names_are_not_imported(before: Recipe, tmp_path: Path) -> None:
    text = as_yaml(before).replace("gated_silu", "no_such_module:ROW")
    (tmp_path / "run" / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=r"^model\.ffn=gated_silu: .*; legal: no_such_module:ROW$"):
        check_resumable(begin(tmp_path), stored(before), before, DATA)


@pytest.mark.parametrize("text", [None, "", "model: [", "\xff"])
def test_without_a_recipe_shapes_alone_are_compared_and_that_is_told(
    before: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    file = tmp_path / "run" / "recipe.yaml"
    file.unlink() if text is None else file.write_bytes(text.encode("latin-1"))
    check_resumable(begin(tmp_path), stored(before), changed(before, model={"topk": 1}), DATA)
    (line,) = caplog.messages
    assert line.startswith("run run: its settings are not compared, because its recipe cannot be read (")


def test_the_recipe_says_the_order_that_an_old_checkpoint_does_not_know(before: Recipe, tmp_path: Path) -> None:
    now = changed(before, training={"seed": 3})
    with pytest.raises(UserError, match=r"^training\.seed=3: run run takes its text in another order; .*; legal: 0$"):
        check_resumable(begin(tmp_path), stored(before, seed=None, global_batch=None), now, DATA)


def test_equal_sequences_are_the_same_data(before: Recipe, tmp_path: Path) -> None:
    """The folder of packed data has another name after `touch`, a copy, or a move."""
    moved: Any = SimpleNamespace(folder=Path("other"), content="same", parts={"": None})
    check_resumable(begin(tmp_path), stored(before, content="same"), before, moved)
    check_resumable(begin(tmp_path), stored(before), before, DATA)
    for known, data in (("another", moved), (None, moved), ("another", DATA)):
        with pytest.raises(UserError, match=r"^resume=run: was trained on other data"):
            check_resumable(begin(tmp_path), stored(before, content=known), before, data)


def test_data_of_an_earlier_version_are_read(before: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither its checkpoints nor its packed data have a hash of what they hold."""
    for name, strip in (("0" * 16, True), ("1" * 16, False)):
        (tmp_path / name).mkdir()
        meta = packed(tmp_path / name)
        for split in ("train", "validation") if strip else ():
            del meta[split]["content"]
        (tmp_path / name / "meta.json").write_text(json.dumps(meta))
    earlier, now = (PackedData.open(tmp_path / name) for name in ("0" * 16, "1" * 16))
    check_resumable(begin(tmp_path), stored(before, data=earlier.folder.name), before, now)
    check_resumable(begin(tmp_path), stored(before, data="2" * 16, content=now.content), before, earlier)
    assert caplog.messages == ["run run: an earlier version wrote no hash of the data, so all their tokens are read"] * 2
    for other in ({"data": "2" * 16, "content": "another"}, {"data": "2" * 16}, {"data": "../.."}):
        with pytest.raises(UserError, match=r"^resume=run: was trained on other data"):
            check_resumable(begin(tmp_path), stored(before, **other), before, earlier)


def test_a_new_run_may_have_other_data(before: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It begins at step 0, so it may have another order and fewer steps. Its model has to fit."""
    other = stored(before, data="other", content="another")
    now = changed(before, training={"seed": 7, "global_batch": 16, "steps": 20})
    found = check_resumable(replace(begin(tmp_path, "from"), stored=other), other, now, DATA)
    assert (found.anew, found.step) == (True, 0)
    taken = "so it takes the weights and the optimizer's state of step 40, and begins at step 0"
    assert caplog.messages[0] == f"checkpoint run: this run has other data, {taken}"
    same = replace(begin(tmp_path, "from"), stored=stored(before))
    assert check_resumable(same, stored(before), before, DATA).step == 40
    with pytest.raises(UserError, match=r"^training\.seed=7: "):
        check_resumable(same, stored(before), now, DATA)
    with pytest.raises(UserError, match=r"^from=run: has another model"):
        check_resumable(begin(tmp_path, "from"), other, changed(before, model={"hidden": 64}), DATA)
    with pytest.raises(UserError, match=r"^resume=run: was trained on other data, .*; a new run may have others: --from /"):
        check_resumable(begin(tmp_path), other, before, DATA)
