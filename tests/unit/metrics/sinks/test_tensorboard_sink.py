"""TensorBoard event files, read back with TensorBoard's own reader."""

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl_rc.config.run import TrainerConfig
from verl_rc.metrics.sinks import open_tracker


def test_scalars_tables_and_histograms_arrive(tmp_path):
    tracker = open_tracker(TrainerConfig(logger=["tensorboard"]), tmp_path, {}, total_steps=2)
    tracker.log({"actor/lr": 0.5}, step=1)
    tracker.log({"actor/lr": 0.25}, step=2)
    tracker.log_table("val/generations", ["input", "score"], [["a|b\nc", 1.0]], step=2)
    tracker.log_histogram("log_ratio", [-1.0, 0.0, 1.0], [3, 1], step=2)
    tracker.alert("title", "a | b\nc", step=2)
    tracker.close()

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/lr")] == [(1, 0.5), (2, 0.25)]
    (histogram,) = events.Histograms("log_ratio")
    assert histogram.histogram_value.num == 4
    assert histogram.histogram_value.sum == pytest.approx(-1.0)  # 3 · -0.5 + 1 · 0.5
    (alert,) = events.Tensors("alerts/text_summary")
    assert alert.tensor_proto.string_val[0].decode() == "**title**<br>a \\| b<br>c"
    (text,) = events.Tensors("val/generations/text_summary")
    assert (
        text.tensor_proto.string_val[0].decode() == "| input | score |\n| --- | --- |\n| a\\|b<br>c | 1.0 |"
    )
