"""The picture of a run: it shows the numbers of metrics.jsonl, needs no display, and no run fails for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from small_runs import ROOT

from verl_rc.cli import main
from verl_rc.insight import picture
from verl_rc.insight.run_folder import read_run
from verl_rc.insight.verdict.estimates import running_mean
from verl_rc.metrics import check_names
from verl_rc.metrics.sinks.local import JsonlSink

ACCURACY, REWARD, ESS, GAP = range(4)
SCORE = "critic/score/mean"
EFFECTIVE = "rollout_corr/rollout_is_eff_sample_size"
MEAN_GAP = "sync/rollout_gap_mean"
VALIDATION = "val-core/digits/acc/mean@1"


def write_run(folder: Path, steps: dict[int, dict[str, float]], steps_done: int = 0) -> Path:
    """A run's metrics, written as a run writes them."""
    sink = JsonlSink(folder, steps_done)
    for step, metrics in steps.items():
        sink.log(metrics, step)
    sink.close()
    return folder


def small_run(folder: Path) -> Path:
    return write_run(
        folder,
        {
            0: {VALIDATION: 0.25, "timing_s/testing": 1.0},
            1: {SCORE: 0.3, EFFECTIVE: 0.9, MEAN_GAP: 0.01},
            2: {SCORE: 0.5, EFFECTIVE: 0.8, MEAN_GAP: 0.02, VALIDATION: 0.75},
        },
    )


def panels_of(folder: Path) -> list:
    figure = Figure()
    picture._draw(figure, read_run(folder))
    return figure.axes


def points(panel, line: int = 0) -> list[tuple[float, float]]:
    return [(float(step), float(value)) for step, value in panel.lines[line].get_xydata()]


def words(panel) -> str:
    return " ".join(
        [panel.get_title(loc="left") or panel.get_title(), *(text.get_text() for text in panel.texts)]
    )


def test_each_panel_shows_its_metric_by_step(tmp_path):
    panels = panels_of(small_run(tmp_path))
    assert points(panels[ACCURACY]) == [(0, 0.25), (2, 0.75)]
    assert points(panels[REWARD]) == [(1, 0.3), (2, 0.5)]
    assert points(panels[ESS]) == [(1, 0.9), (2, 0.8)]
    assert points(panels[GAP]) == [(1, 0.01), (2, 0.02)]


def test_the_metrics_drawn_are_those_that_runs_report():
    check_names([picture._SCORE, picture._ESS, picture._GAP, VALIDATION])
    assert {SCORE, EFFECTIVE, MEAN_GAP} == {picture._SCORE, picture._ESS, picture._GAP}


def test_axes_say_what_they_show_and_in_which_unit(tmp_path):
    panels = panels_of(small_run(tmp_path))
    assert [words(panel).split(" ")[0] for panel in panels] == ["Accuracy", "Reward", "Effective", "Gap"]
    assert "0.25" in words(panels[ACCURACY])
    assert "0.75" in words(panels[ACCURACY])
    assert all(panel.get_ylabel() for panel in panels)
    assert "nats" in panels[GAP].get_ylabel()
    assert [panel.get_xlabel() for panel in panels[2:]] == ["training step", "training step"]


def test_a_long_run_has_a_running_mean_over_every_step(tmp_path):
    values = [float(step % 2) for step in range(1, 61)]
    panel = panels_of(write_run(tmp_path, {step: {SCORE: value} for step, value in enumerate(values, 1)}))[
        REWARD
    ]
    assert points(panel, 0) == list(zip(range(1, 61), values, strict=True))
    means = [value for _, value in points(panel, 1)]
    assert means[0] == 1.0
    assert means[3:] == [0.5] * 57  # 60 steps are averaged over 4, two ones and two zeros
    assert panel.get_legend().get_texts()[0].get_text() == "mean of 4 steps"


def test_a_running_mean_looks_back_only():
    assert running_mean([4.0, 2.0, 6.0, 1.0], 2) == [4.0, 3.0, 4.0, 3.5]
    assert running_mean([4.0, 2.0], 1) == [4.0, 2.0]


def test_every_data_source_has_its_line(tmp_path):
    panel = panels_of(
        write_run(tmp_path, {0: {"val-core/a/b/acc/mean@4": 0.1, "val-core/c/acc/mean@4": 0.2}})
    )[ACCURACY]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["a/b", "c"]
    assert [points(panel, line) for line in (0, 1)] == [[(0, 0.1)], [(0, 0.2)]]


def test_validation_without_accuracy_is_called_reward(tmp_path):
    panel = panels_of(write_run(tmp_path, {0: {"val-core/a/reward/mean@1": -3.0}}))[ACCURACY]
    assert words(panel).startswith("Reward on validation")
    low, high = panel.get_ylim()
    assert low < -3.0 < high


def test_what_a_run_did_not_measure_is_said(tmp_path):
    panels = panels_of(write_run(tmp_path, {1: {SCORE: 0.5}}))
    assert ["not measured" in words(panel) for panel in panels] == [True, False, True, True]


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    panels = panels_of(
        write_run(
            tmp_path, {1: {SCORE: 0.5}, 2: {SCORE: float("nan")}, 3: {SCORE: float("inf")}, 4: {SCORE: 1}}
        )
    )
    assert points(panels[REWARD]) == [(1, 0.5), (4, 1.0)]


def test_a_resumed_run_shows_all_its_steps_once(tmp_path):
    write_run(tmp_path, {step: {SCORE: step / 10} for step in (1, 2, 3)})
    write_run(tmp_path, {step: {SCORE: step / 5} for step in (3, 4)}, steps_done=2)
    assert points(panels_of(tmp_path)[REWARD]) == [(1, 0.1), (2, 0.2), (3, 0.6), (4, 0.8)]


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path):
    small_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "critic/sc')
    assert len(points(panels_of(tmp_path)[REWARD])) == 2
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('ore/mean": 0.5}')  # the line is whole now, but for its end
    assert len(points(panels_of(tmp_path)[REWARD])) == 3


def test_the_picture_is_a_png_of_readable_size_and_no_background(tmp_path):
    path = picture.draw_run(small_run(tmp_path))
    assert path == tmp_path / "training_curves.png"
    height, width, channels = imread(path).shape
    assert 1200 <= width <= 2000
    assert 600 <= height <= 1200
    assert channels == 4
    assert imread(path)[0, 0, 3] == 0  # transparent
    assert path.stat().st_size < 150_000


def test_no_display_and_no_interactive_backend_is_needed(tmp_path):
    environment = {
        key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")
    }
    environment |= {"MPLBACKEND": "module://window_of_some_notebook", "PYTHONPATH": str(ROOT)}
    code = """
import sys
import verl_rc.insight.picture
from verl_rc.cli import main
assert "matplotlib" not in sys.modules  # a run waits for it at its end only
sys.exit(main(["plot", sys.argv[1]]))
"""
    command = [sys.executable, "-c", code, str(small_run(tmp_path))]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"{tmp_path / 'training_curves.png'}\n"), result.stderr
    assert (tmp_path / "training_curves.png").is_file()


@pytest.mark.parametrize("content", [None, ""])
def test_a_folder_without_steps_is_refused_by_the_command(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main(["plot", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verl-rc plot: ")
    assert "must be a run's folder" in line


@pytest.mark.parametrize("line", ["[1, 2]", '{"reward": 1}', "step 1", '{"step": "one"}', "1"])
def test_a_line_that_is_no_record_is_left_out(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "{SCORE}": 0.5}}\n{line}\n')
    assert points(panels_of(tmp_path)[REWARD]) == [(1, 0.5)]


def test_a_log_of_another_trainer_is_drawn_beside_it(tmp_path):
    log = tmp_path / "console.log"
    log.write_text(f"step:1 - {SCORE}:0.25\nstep:2 - {SCORE}:0.75\n")
    assert points(panels_of(log)[REWARD]) == [(1, 0.25), (2, 0.75)]
    assert picture.draw_run(log) == tmp_path / "training_curves.png"
