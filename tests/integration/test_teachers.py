"""Two teachers, each for the rows of a data source: one is the policy itself, the other has another shape."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from real_runs import metrics_of, train
from small_runs import make_tiny_model, run_overrides, share_of_digits

from verl_rc.records.token_records.token_parquet import read_record

TEACHERS = "distillation.teacher_models"


@pytest.mark.slow
def test_each_teacher_scores_the_rows_of_its_data_source(task: dict[str, Path], tmp_path: Path) -> None:
    table = pq.read_table(task["data"] / "train.parquet")
    sources = pa.array(["same", "other"] * (len(table) // 2))
    place = table.column_names.index("data_source")
    data, other, run = tmp_path / "train.parquet", tmp_path / "other", tmp_path / "run"
    pq.write_table(table.set_column(place, "data_source", sources), data)
    sizes = ["--hidden_size", "64", "--intermediate_size", "96", "--num_layers", "1", "--num_heads", "2"]
    make_tiny_model.main(["--output_dir", str(other), *sizes, "--num_kv_heads", "1", "--seed", "5"])
    overrides = [
        *run_overrides(task, run),
        f"data.train_files={data}",
        share_of_digits(tmp_path),
        "distillation.enabled=True",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        "distillation.distillation_loss.topk=4",
        f"+{TEACHERS}.first.model_path={task['model']}",
        f"+{TEACHERS}.first.key=same",
        f"+{TEACHERS}.second.model_path={other}",
        "actor_rollout_ref.ref.fsdp_config.dtype=float32",
        "trainer.total_training_steps=3",
    ]
    lacking = train([*overrides, f"+{TEACHERS}.second.key=nobody"])
    assert lacking.returncode == 2, lacking.stderr[-3000:]
    assert "no row has nobody; the sources are other, same." in lacking.stderr
    result = train([*overrides, f"+{TEACHERS}.second.key=other"])
    assert result.returncode == 0, result.stderr[-3000:]
    steps = metrics_of(run)
    assert all(steps[step]["distillation/loss"] > 0 for step in (1, 2, 3))
    [path] = (run / "tokens").glob("*1.parquet")
    record = read_record(path)
    source = np.repeat(record.rows["source"], record.lengths)
    gap = np.abs(record.tokens["teacher_log_prob"].astype(float) - record.tokens["old_log_prob"])
    assert set(source) == {"same", "other"}
    assert gap[source == "same"].max() < 0.01  # stored in float16
    assert gap[source == "other"].mean() > 0.1
