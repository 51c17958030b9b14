"""Files of recorded routes: what they hold, which attempt counts, and one line for each that is damaged."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foldray.blueprint import rank_shares
from foldray.errors import UserError
from foldray.fold import Fold
from foldray.recipe import Recipe
from trainers.folders import Folder
from trainers.routes.files import ABOUT, About, FileName, bytes_of_counts, bytes_of_tokens, told_of_routes
from trainers.routes.recorded import Recorded
from trainers.routes.summary import summary
from trainers.routes.writing import RouteWriter

SMALL: dict[str, Any] = {
    "layers": 2, "moe_every": 1, "experts": 4, "topk": 2, "hidden": 8, "heads": 2, "kv_heads": 2, "head_dim": 4, "ffn_hidden": 8,
    "expert_hidden": 8, "vocab": 320,
}  # fmt: skip
ABOUT_ALL = About(layers=(1, 3), experts=4, topk=2, seq_len=6, global_batch=3, seed=0, order=2, content="a")


def write(run: Path, attempt: int, steps: range, rank: int = 0, shift: int = 0, layers: tuple[int, ...] = (1, 3)) -> None:
    """Write the routes of a rank which has every second position. `shift` tells attempts apart."""
    folder = Folder(str(run / "routes"))
    folder.write(ABOUT, ABOUT_ALL.model_dump_json().encode())
    writer = RouteWriter(folder, rank, attempt, ABOUT_ALL)
    for step in steps:
        experts = [chosen(rank, step + shift, sequences, layers) for sequences in (2, 1)]
        counts = torch.zeros(2, 4, dtype=torch.int64)
        for row, layer in enumerate(layers):
            every = torch.cat([part.expert_MBsK[row].flatten() for part in experts])
            counts[ABOUT_ALL.layers.index(layer)] = torch.bincount(every, minlength=4)
        writer.add(step, layers, counts, experts if step % 2 == 0 else (), [0, 1, 2])
    writer.close()


def chosen(rank: int, step: int, sequences: int, layers: tuple[int, ...]) -> Any:
    position_s = torch.arange(rank % 2, 6, 2)
    shape = len(layers), sequences, 3, 2
    first = torch.full(shape[:-1], step % 4) + torch.tensor(layers).view(-1, 1, 1)
    return SimpleNamespace(expert_MBsK=torch.stack([first % 4, (first + 1) % 4], dim=-1).int(), position_s=position_s)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks with every second position each. Steps 3 and 4 ran again."""
    for rank in range(2):
        write(tmp_path, 1000, range(1, 5), rank)
        write(tmp_path, 2000, range(3, 7), rank, shift=1)
    return tmp_path


def test_steps_counts_and_experts(run: Path) -> None:
    recorded = Recorded(str(run), "routes.replay")
    assert recorded.steps == [1, 2, 3, 4, 5, 6]
    assert recorded.about == ABOUT_ALL
    for step, shift in ((2, 0), (4, 1), (6, 1)):  # step 4 is that of the second attempt
        experts = recorded.experts(step, [2, 0])
        assert experts.shape == (2, 2, 6, 2)
        expected = (step + shift + np.array([1, 3])) % 4
        np.testing.assert_array_equal(experts[..., 0], np.broadcast_to(expected[:, None, None], (2, 2, 6)))
        assert recorded.counts(step).shape == (2, 2, 4)
        np.testing.assert_array_equal(recorded.counts(step).sum(axis=(0, 2)), [3 * 6 * 2] * 2)
    assert recorded.experts(3, [0]) is None
    assert recorded.experts(8, [0]) is None
    assert recorded.counts(8).shape == (0, 2, 4)


def test_ranks_of_a_pipeline_have_blocks_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, 1000, range(1, 3), rank, layers=(1,))
    for rank in range(2, 4):
        write(tmp_path, 1000, range(1, 3), rank, layers=(3,))
    recorded = Recorded(str(tmp_path), "routes.replay")
    assert (recorded.counts(2).sum(axis=2) > 0).tolist() == [[True, False]] * 2 + [[False, True]] * 2
    assert recorded.experts(2, [0]).min() >= 0
    (tmp_path / "routes" / str(FileName(1000, 2, 3))).unlink()
    with pytest.raises(UserError, match="lacks files of step 2"):
        Recorded(str(tmp_path), "routes.replay").experts(2, [0])


def test_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    """Without headers. 16 ranks with 4,096 tokens of Qwen3-30B each: 12 KiB of counts a rank, 384 bytes for a token's experts."""
    for rank in range(2):
        write(tmp_path, 1000, range(2, 3), rank)
    arrays = [np.load(path) for path in (tmp_path / "routes").glob("*.npz")]
    sizes = {"data": {"seq_len": 6}, "training": {"global_batch": 3, "steps": 4}, "fold": {"tp": 2}, "cluster": {"workers": 2}}
    recipe = Recipe.parse({"model": SMALL, **sizes, "routes": {"record": 1, "record_tokens": 2}})
    assert sum(part["counts"].nbytes for part in arrays) == bytes_of_counts(recipe) == 2 * 2 * 4
    assert sum(part["experts_2"].nbytes for part in arrays) == bytes_of_tokens(recipe) == 18 * 2 * 2
    assert told_of_routes(recipe) == "routes: the counts of 4 steps and the tokens of 2 take up to 208 B in the run's folder"
    qwen = Recipe.parse({
        "model": {"preset": "qwen3-30b-a3b"}, "data": {"seq_len": 4096}, "training": {"global_batch": 16}, "fold": {"ep": 16},
        "cluster": {"workers": 16},
    })  # fmt: skip
    assert bytes_of_counts(qwen) == 16 * 48 * 128 * 2
    assert bytes_of_tokens(qwen) == 16 * 4096 * 384
    assert told_of_routes(qwen) is None


def test_typical_shares_are_those_of_the_median_overload(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "routes"))
    folder.write(ABOUT, ABOUT_ALL.model_dump_json().encode())
    writer = RouteWriter(folder, 0, 1000, ABOUT_ALL)
    for step, fullest in enumerate((9, 5, 8, 6), 1):
        rest = (18 - fullest) // 3
        counts = torch.tensor([[rest, fullest, rest, 18 - fullest - 2 * rest]] * 2)
        writer.add(step, (1, 3), counts)
    writer.close()
    shares = Recorded(str(tmp_path), "routes").typical_shares()
    assert shares == pytest.approx([3 / 9, 8 / 9, 3 / 9, 4 / 9])
    assert sum(shares) == pytest.approx(2)
    model = Recipe.parse({"model": {**SMALL, "router": {"shares": shares}}}).model
    assert rank_shares(model, 2) == pytest.approx([(3 + 8) / 9, (3 + 4) / 9])


@pytest.mark.parametrize(("key", "value"), [
    ("layers", (1, 2)), ("experts", 8), ("topk", 1), ("seq_len", 8), ("global_batch", 4), ("seed", 1), ("content", "b"),
    ("order", 1),
])  # fmt: skip
def test_routes_of_another_training_are_refused(run: Path, key: str, value: Any) -> None:
    recorded = Recorded(str(run), "routes.replay")
    recorded.check(ABOUT_ALL)
    with pytest.raises(UserError, match=r"^routes\.replay=.*: has routes of a training with another "):
        recorded.check(ABOUT_ALL.model_copy(update={key: value}))


def _rewrite(file: Path, **arrays: Any) -> None:
    kept = dict(np.load(file))
    np.savez(file, **{name: value for name, value in (kept | arrays).items() if value is not None})


def _evil(file: Path) -> None:
    np.savez(file, steps=np.array([print], dtype=object))


def _bomb(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("steps.npy", bytes((1 << 30) + 1))


DAMAGE: dict[str, Any] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:200]),
    "empty": lambda file: file.write_bytes(b""),
    "a pickle": _evil,
    "a bomb": _bomb,
    "no steps": lambda file: _rewrite(file, steps=None),
    "steps that fall": lambda file: _rewrite(file, steps=np.array([4, 3])),
    "numbers with fractions": lambda file: _rewrite(file, counts=np.ones((4, 2, 4))),
    "other counts": lambda file: _rewrite(file, counts=np.ones((4, 2, 5), np.int64)),
    "other blocks": lambda file: _rewrite(file, layers=np.array([1, 2])),
    "no expert of the model": lambda file: _rewrite(file, experts_2=np.full((2, 3, 3, 2), 4)),
    "experts of other shape": lambda file: _rewrite(file, experts_2=np.zeros((2, 3, 2, 2), np.int64)),
    "positions too far": lambda file: _rewrite(file, positions=np.array([0, 2, 6])),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: str) -> None:
    for rank in range(2):
        write(tmp_path, 1000, range(1, 5), rank)
    DAMAGE[damage](tmp_path / "routes" / str(FileName(1000, 4, 0)))
    recorded = Recorded(str(tmp_path), "routes.replay")
    with pytest.raises(UserError, match=r"^routes\.replay=.*: its routes/0000000001000-00000004-rank00000\.npz [^\n]*$"):
        _ = recorded.counts(2), recorded.experts(2, [0, 1, 2])


def test_a_folder_without_routes_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no recorded routes; routes\.record in its recipe"):
        Recorded(str(tmp_path), "routes.replay")
    with pytest.raises(UserError, match="has no recorded routes"):
        Recorded(str(tmp_path / "nowhere"), "routes")
    (tmp_path / "routes").mkdir()
    for content, what in (("{", "cannot be read"), (json.dumps({"experts": 4}), "layers: Field required")):
        (tmp_path / "routes" / ABOUT).write_text(content)
        with pytest.raises(UserError, match=rf"its routes/routes\.json .*{what}"):
            Recorded(str(tmp_path), "routes")


def test_counts_alone_cannot_be_replayed(tmp_path: Path) -> None:
    write(tmp_path, 1000, range(1, 2))
    recorded = Recorded(str(tmp_path), "routes.replay")
    with pytest.raises(UserError, match=r"has only counts; routes\.record_tokens"):
        recorded.check(ABOUT_ALL)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RouteWriter(Folder(str(tmp_path)), 0, 1000, ABOUT_ALL)
    monkeypatch.setattr(np, "savez", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    writer.add(1, (1, 3), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(OSError, match="No space left"):
        writer.close()


def test_a_summary_over_ranks(tmp_path: Path) -> None:
    """Of two ranks with two experts each, the first one's tokens all go to expert 0, the second one's to expert 3 and 1."""
    folder = Folder(str(tmp_path / "routes"))
    folder.write(ABOUT, ABOUT_ALL.model_dump_json().encode())
    assert summary(Recorded(str(tmp_path), "RUN"), Fold(2, ep=2)) is None
    for rank, counts in enumerate(([[8, 0, 0, 0]] * 2, [[0, 2, 0, 6]] * 2)):
        writer = RouteWriter(folder, rank, 1000, ABOUT_ALL)
        writer.add(1, (1, 3), torch.tensor(counts))
        writer.close()
    found = summary(Recorded(str(tmp_path), "RUN"), Fold(2, ep=2))
    assert found == {"steps": 1, "overload": [10 / 8] * 3, "stays": pytest.approx((8 + 6) / 16)}
