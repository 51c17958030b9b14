"""The page of the experts' health: every kind of run gets it, and it shows what is wrong."""

import warnings

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.trainers.pictures.test_training import size
from tests.trainers.telemetry.records import history, resumed, run, step
from trainers.pictures import health
from trainers.pictures.health import _columns, _worst, draw_health
from trainers.telemetry.expert_health import Course
from trainers.telemetry.history import History


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    "past",
    [
        history(*run(60)),
        history(*run(60), resumed(20), step(21, load=[[1] * 8] * 4), step(22, load=[[2] * 8] * 4)),
        history(*run(60), resumed(20)),
        history(*run(300, layers=2), resumed(0)),
        history(step(1, load=[[3, 1]])),
        history(*run(12, layers=1, experts=1)),
        history(*run(12, layers=61, experts=256)),
        history(step(1, load=[[0, 0], [0, 0]]), step(2, load=[[0, 0], [0, 0]])),
        history(step(1)),
        History(),
    ],
    ids=["usual", "resumed", "rewound", "from zero", "one step", "one expert", "large", "no tokens", "dense", "nothing"],
)
def test_the_page_is_drawn(past, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_health(past, tmp_path / "health.png", "a-run")
    width, height = size(tmp_path / "health.png")
    assert 1000 < width < 2100
    assert 400 < height < 2000
    assert [path.name for path in tmp_path.iterdir()] == ["health.png"]


@pytest.fixture
def page(monkeypatch, tmp_path):
    """`page(history)` draws a page and returns its figure."""

    def draw(past: History, layers: range | None = None) -> Figure:
        kept: list[Figure] = []
        monkeypatch.setattr(health, "save", lambda figure, path: kept.append(figure))
        draw_health(past, tmp_path / "health.png", "a-run", layers)
        return kept[0]

    return draw


def words(figure: Figure) -> set[str]:
    return {text.get_text() for axes in figure.axes for text in axes.texts} | {text.get_text() for text in figure.texts}


def test_a_dead_expert_is_black_and_counted(page):
    figure = page(history(*(step(count, load=[[5, 5, 0, 5], [4, 4, 4, 4]]) for count in range(1, 31))), range(1, 3))
    first, second = figure.axes[:2]
    assert (first.get_title("left"), second.get_title("left")) == ("layer 1", "layer 2")
    image = first.images[0].get_array()
    assert (image[2] == 0).all()
    assert (image[[0, 1, 3]] > 0.3).all()
    assert (second.images[0].get_array() > 0.9).all()  # the even share is white
    assert {"dead 1", "starved 1"} <= words(figure)


def test_the_lines_end_at_the_newest_values(page):
    records = [step(count, load=[[2, 2, 2, 2], [6, 2, 0, 0]]) for count in range(1, 31)]
    assert {"0.406", "expert 3.00", "rank 2.00", "1.000", "layer 1"} <= words(page(history(*records)))


def test_runs_of_an_older_foldray_have_no_line_for_ranks(page):
    old = step(1, load=[[2, 2]])
    for name in ("rank_max_over_mean", "load_entropy", "by_layer"):
        del old[name]  # type: ignore[misc]
    shown = words(page(history(old, {**old, "step": 2})))
    assert "expert 1.00" in shown
    assert not any(text.startswith("rank") for text in shown)


def test_layers_with_dead_experts_come_first_and_then_those_of_low_entropy():
    loads = [[5, 5, 5, 5], [9, 1, 5, 5], [7, 7, 6, 0], [5, 5, 5, 6]]
    past = history(step(1, load=loads))
    assert [_worst(past, count) for count in (1, 2, 4)] == [[2], [1, 2], [0, 1, 2, 3]]


def test_steps_that_were_forgotten_belong_to_no_column():
    course = Course()
    for at in (1, 2, 5):
        course.add(at, np.ones((1, 2)))
    assert _columns(course, 5).tolist() == [0, 1, -1, -1, 2]
    assert _columns(course, 10).tolist() == [0, 0, 1, 1, -1, -1, -1, -1, 2, 2]
