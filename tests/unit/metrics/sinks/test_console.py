"""The console's line."""

import io

from rich.console import Console

from verl_rc.metrics.sinks import ConsoleSink

STEP = {
    "critic/score/mean": 0.4375,
    "response_length/mean": 11.0,
    "actor/pg_loss": -0.0123,
    "actor/grad_norm": 0.412,
    "rollout_corr/rollout_is_eff_sample_size": 0.971,
    "sync/rollout_gap_mean": 0.0213,
    "perf/total_num_tokens": 5000.0,
    "timing_s/step": 2.5,
}


def lines_of(*steps, total_steps=55, **console):
    stream = io.StringIO()
    sink = ConsoleSink(total_steps, Console(file=stream, **console))
    for step, metrics in steps:
        sink.log(metrics, step)
    sink.close()
    return stream.getvalue().splitlines()


def test_one_line_a_step_with_the_numbers_people_watch():
    assert lines_of((12, STEP)) == [
        "step 12/55  reward 0.438  len 11.0  pg_loss -0.0123  grad 0.412  ESS 0.971  |gap| 0.021  2,000 tok/s  2.5 s  ETA 1m48s"
    ]


def test_numbers_that_are_absent_are_left_out_and_the_last_step_has_no_time_left():
    assert lines_of((55, {"timing_s/step": 1.0})) == ["step 55/55  1.0 s"]


def test_validation_accuracy_is_shown_and_step_zero_does_not_enter_the_time_left():
    metrics = {"val-core/digits/sort/acc/mean@1": 0.171875, "timing_s/step": 100.0}
    lines = lines_of((0, metrics), (1, {"timing_s/step": 2.0}))
    assert lines[0] == "step 0/55  val digits/sort acc 0.172  100.0 s"
    assert lines[1].endswith("ETA 1m48s")  # 54 steps of 2 s


def test_statistics_of_several_samples_keep_their_name():
    line = lines_of((2, {"val-core/digits/acc/best@8/mean": 0.5, "val-core/digits/acc/mean@8": 0.25, "timing_s/step": 1.0}))[0]
    assert "val digits acc best@8/mean 0.500" in line
    assert "val digits acc mean@8 0.250" in line


def test_long_lines_are_not_wrapped_and_brackets_are_no_markup():
    metrics = {f"val-core/[bold]source{i}/acc/mean@1": 0.5 for i in range(9)}
    assert len(lines_of((1, metrics), width=40)) == 1
    assert "[bold]source8" in lines_of((1, metrics), width=40)[0]


def test_a_terminal_gets_a_bar_as_well():
    shown = "\n".join(lines_of((1, STEP), (2, STEP), force_terminal=True, width=200))
    assert "step 2/55" in shown
    assert "2/55" in shown.replace("step 2/55", "")


def test_an_alert_is_a_line_a_complaint():
    stream = io.StringIO()
    ConsoleSink(55, Console(file=stream)).alert("not healthy", "a = 1 [0 to 1]\nb = 2", step=3)
    assert stream.getvalue().splitlines() == ["warning: not healthy: a = 1 [0 to 1]", "warning: not healthy: b = 2"]
