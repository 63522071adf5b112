"""Models that read pictures: a real engine and the trainer see the same ones, before and after updates, and
whole runs with them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_runs import differences
from real_runs import left_over_processes, metrics_of, of_folder, train
from small_engines import start_small_engine
from small_runs import ROOT, run_overrides, share_of_digits
from small_vision import Prompts, batch_of, picture, use_torchvision, write_model

from verl_rc.records.parts import Sample, token_ids
from verl_rc.records.pictures import Pictures
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.rollout.vllm.options import _picture_arguments
from verl_rc.runtime.weight_sync.sender import every_name
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import load_causal_lm

ROUNDING = 1e-5
"""In nats: both sides compute in float32."""
QUESTION = "How many squares are in this picture? <image>"
PROMPTS = [
    (QUESTION, picture(1)),
    (QUESTION, picture(2)),
    ("<image> and <image>: which?", picture(1), picture(3, 56, 84)),
    ("plain text",),
]


class Sides:
    """A model in an engine and in the trainer."""

    def __init__(self, folder: str, served: str, **arguments: Any) -> None:
        self.prompts = Prompts(folder)
        self.model: Any = load_causal_lm(folder, torch.float32).eval()
        given = {**_picture_arguments(None), **arguments}
        self.engine: ChildProcess = start_small_engine(Path(folder), given, served, pixel_limits={})
        self.version = 0

    def move(self, part: str) -> None:
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if part in name:
                    weight.add_(0.05 * torch.randn_like(weight))

    def update(self) -> None:
        self.version += 1
        [receipt] = self.engine.call("load", dict(every_name(self.model)), self.version, "float32")
        assert (receipt.not_loaded, receipt.unread) == ([], [])

    def gap(self, swapped: bool = False) -> float:
        """The largest |log-ratio|; ``swapped``: the trainer sees another picture."""
        rows = [self.prompts.encode(*prompt) for prompt in PROMPTS]
        requests = [GenerationRequest(ids, seed, pictures=one) for seed, (ids, one) in enumerate(rows)]
        sampling = SamplingOptions(1.0, 1.0, -1, max_tokens=12, stop_token_ids=(), ignore_eos=True)
        samples: list[Sample] = self.engine.call("generate", requests, sampling)
        assert [sample.pictures for sample in samples] == [
            0 if one is None else one.number for _, one in rows
        ]
        if swapped:
            other = Pictures([picture(9)])
            rows = [(ids, other if one and len(one.data) == 1 else one) for ids, one in rows]
        batch = batch_of(rows, [token_ids(sample.parts) for sample in samples])
        with torch.no_grad():
            scores = score_tokens(self.model, batch, ForwardOptions(), with_entropy=False).log_probs
        engine = torch.stack([torch.cat([part.log_probs for part in sample.parts]) for sample in samples])
        return float((scores - engine).abs().max())


@pytest.fixture
def sides(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    use_torchvision(monkeypatch)
    family, served, arguments = request.param
    both = Sides(write_model(tmp_path, family), f"loaded_engine:{served}", **arguments)
    try:
        yield both
    finally:
        both.engine.end()


@pytest.mark.parametrize(
    "sides",
    [
        ("qwen3_vl", "LoadedEngine", {}),
        pytest.param(("qwen2_5_vl", "LoadedEngine", {}), marks=pytest.mark.slow),
    ],
    indirect=True,
    ids=["qwen3_vl", "qwen2_5_vl"],
)
def test_both_sides_see_the_same_pictures(sides: Sides) -> None:
    sides.update()
    assert sides.gap() < ROUNDING
    assert sides.gap() < ROUNDING  # prompts come from the prefix cache
    assert sides.gap(swapped=True) > 1000 * ROUNDING
    for part in ("visual", "language_model"):
        sides.move(part)
        assert sides.gap() > 1000 * ROUNDING
        sides.update()
        assert sides.gap() < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("sides", [("qwen3_vl", "StalePictures", {})], indirect=True)
def test_what_older_weights_made_of_a_picture_would_be_seen(sides: Sides) -> None:
    """Planted: the hash that vLLM keeps it by lacks the version of the weights."""
    sides.update()
    assert sides.gap() < ROUNDING
    sides.move("visual")
    sides.update()
    assert sides.gap() > 1000 * ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    "sides", [("qwen3_vl", "LoadedEngine", {"mm_device_do_normalize": True})], indirect=True
)
def test_pixels_that_are_normalised_twice_would_be_seen(sides: Sides) -> None:
    """Planted: vLLM's default."""
    sides.update()
    assert sides.gap() > 1000 * ROUNDING


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model and rows of which every third has no picture."""
    folder = tmp_path_factory.mktemp("squares")
    write_model(folder / "model", "qwen3_vl")
    squares = [sys.executable, "scripts/prepare_data/squares.py", "--output_dir", str(folder / "data")]
    sizes = ["--num_train", "48", "--num_val", "4", "--num_sft", "4", "--num_sft_val", "4"]
    subprocess.run([*squares, *sizes], cwd=ROOT, check=True, capture_output=True)
    without_some(folder / "data" / "train.parquet")
    return {"model": folder / "model", "data": folder / "data"}


def without_some(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    for row in rows[::3]:
        row["images"] = []
        row["prompt"][0]["content"] = row["prompt"][0]["content"].removeprefix("<image>")
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture(scope="module")
def overrides(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        *run_overrides(task, task["model"] / "nowhere"),
        share_of_digits(tmp_path_factory.mktemp("reward")),
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=4",
        "trainer.val_before_train=False",
        "trainer.save_freq=1",
    ]


TRAINED = "actor_rollout_ref.actor.freeze_vision_tower=False"


@pytest.mark.slow
def test_two_ranks_train_as_one_where_one_of_them_has_no_picture(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches of one row: in some of them only one rank enters the tower with a picture."""
    use_torchvision(monkeypatch)
    rows = [
        "actor_rollout_ref.actor.use_dynamic_bsz=False",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ]
    for ranks in (1, 2):
        further = [f"trainer.n_gpus_per_node={ranks}", "trainer.total_training_steps=2", TRAINED]
        run = train([*overrides, *rows, *further, *of_folder(tmp_path / str(ranks))])
        assert run.returncode == 0, run.stderr[-3000:]
    one, two = (metrics_of(tmp_path / str(ranks)) for ranks in (1, 2))
    for step in (1, 2):
        assert one[step]["actor/grad_norm"] > 0
        assert two[step]["actor/grad_norm"] == pytest.approx(one[step]["actor/grad_norm"], rel=1e-3)
        assert two[step]["critic/rewards/mean"] == one[step]["critic/rewards/mean"]
        assert one[step]["sync/rollout_gap_max"] < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_a_killed_run_one_step_off_goes_on_to_the_last_bit(
    tower: str,
    task: dict[str, Path],
    overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is exported, with what reads pictures, and the tower that it began with if it is frozen."""
    use_torchvision(monkeypatch)
    ahead = [*overrides, "async=one_step_off", "actor_rollout_ref.actor.checkpoint.async_save=False"]
    ahead += [TRAINED] if tower == "trained" else []
    whole, again = [*ahead, *of_folder(tmp_path / "whole")], [*ahead, *of_folder(tmp_path / "again")]
    assert train(whole).returncode == 0
    point = ("verl_rc.trainer.stages:update_actor", "3", "0.01")
    assert train(again, "driver", "SIGKILL", *point).returncode != 0
    result = train(again)
    assert result.returncode == 0, result.stderr[-3000:]
    assert not differences(tmp_path / "whole", tmp_path / "again", 4)
    assert not left_over_processes()
    exported = tmp_path / "exported"
    command = [sys.executable, "-m", "verl_rc.cli", "export", str(tmp_path / "whole" / "global_step_4")]
    command += ["--output", str(exported)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert Prompts(str(exported)).encode(QUESTION, picture(1))[0]
    trained, first = (
        load_causal_lm(str(path), torch.float32).state_dict() for path in (exported, task["model"])
    )
    moved = {name for name, weight in trained.items() if not torch.equal(weight, first[name])}
    assert any(".visual." in name for name in moved) == (tower == "trained")
    assert "lm_head.weight" in moved
