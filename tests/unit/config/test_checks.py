"""Checks between keys list all problems at once; folders that cannot be written to are found, and nothing is
left in them."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from verl_rc.config import paths
from verl_rc.config.checks import check_run
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_config
from verl_rc.config.paths import check_files
from verl_rc.config.run import RunConfig


def make_config(folder: Path, *overrides: str) -> RunConfig:
    paths = [
        f"data.train_files={folder}/a.parquet",
        f"data.val_files={folder}/b.parquet",
        f"actor_rollout_ref.model.path={folder}",
    ]
    small = [
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.n=4",
    ]
    return load_config(RunConfig, [*paths, *small, "algorithm.adv_estimator=grpo", *overrides])


def test_a_sound_run_passes(tmp_path: Path) -> None:
    check_run(make_config(tmp_path))


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(make_config(tmp_path, "data.train_batch_size=100", "actor_rollout_ref.rollout.top_p=0.5"))
    assert len(str(caught.value).splitlines()) == 2


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_files(make_config(tmp_path))
    message = str(caught.value)
    assert all(name in message for name in ("a.parquet", "b.parquet", "actor_rollout_ref.model.path"))


def test_files_that_are_there_pass(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet", "config.json"):
        (tmp_path / name).touch()
    check_files(make_config(tmp_path))


@pytest.mark.parametrize(
    "key", ["trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"]
)
def test_output_that_could_not_be_written_is_refused_before_anything_starts(tmp_path: Path, key: str) -> None:
    for name in ("a.parquet", "b.parquet", "config.json"):
        (tmp_path / name).touch()
    with pytest.raises(
        ConfigError, match=f"^{key} must be a folder that can be written to, got .*: Not a directory"
    ):
        check_files(make_config(tmp_path, f"{key}={tmp_path}/a.parquet/run"))


def test_a_hub_id_is_not_looked_for_on_disk(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).touch()
    check_files(make_config(tmp_path, "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train_weights=[1,2]"],
            "data.train_weights must hold one number for each of the 1 data.train_files, got 2",
        ),
        (["data.train_weights=[0]"], r"data.train_weights must be positive numbers, got \[0.0\]"),
        (["data.custom_cls.path=a.py"], "data.custom_cls.path and data.custom_cls.name belong together"),
        (
            ["data.custom_cls.path=a.py", "data.custom_cls.name=A", "data.train_weights=[1]"],
            "data.train_weights is refused with data.custom_cls",
        ),
        (
            ["actor_rollout_ref.rollout.allow_special_tokens=True"],
            "allow_special_tokens=True has no effect without tools or an environment",
        ),
        (
            ["actor_rollout_ref.rollout.multi_turn.format=tag"],
            "multi_turn has no effect without .*, but format was given",
        ),
        (
            ["actor_rollout_ref.rollout.multi_turn.enable=True"],
            r"needs a tool: pass .*multi_turn.tools=\[calculator\]",
        ),
        (
            [
                "actor_rollout_ref.rollout.multi_turn.enable=True",
                "actor_rollout_ref.rollout.multi_turn.tools=[calculator]",
                "actor_rollout_ref.rollout.ignore_eos=True",
            ],
            "needs turns that end",
        ),
    ],
)
def test_data_and_tools_that_contradict(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(make_config(tmp_path, *overrides))


def test_a_class_of_ones_own_finds_its_data_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    own = ["data.custom_cls.name=Own", f"data.custom_cls.path={tmp_path}/own.py"]
    with pytest.raises(
        ConfigError, match=r"^data.custom_cls.path must name existing files.*own.py' does not exist.$"
    ):
        check_files(make_config(tmp_path, *own))
    (tmp_path / "own.py").touch()
    check_files(make_config(tmp_path, *own))


@pytest.fixture
def read_only(monkeypatch):
    """What a mount without write access answers; permissions alone would not stop root."""

    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)


def test_a_folder_that_is_there_or_can_be_made_has_no_problem(tmp_path):
    assert paths.why_unwritable(tmp_path) is None
    assert paths.folder_problem("trainer.output_dir", str(tmp_path / "new" / "run")) is None
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_folder_is_named_with_its_key_the_reason_and_what_to_do(tmp_path, read_only):
    assert paths.folder_problem("trainer.output_dir", str(tmp_path / "run")) == (
        f"trainer.output_dir must be a folder that can be written to, got {str(tmp_path / 'run')!r} "
        f"({tmp_path}: Read-only file system). Pass another one: trainer.output_dir=<folder>."
    )


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    assert paths.why_unwritable(tmp_path / "file" / "run") == f"{tmp_path / 'file'}: Not a directory"


@pytest.mark.skipif(os.getuid() == 0, reason="permissions do not stop root")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o555)
    assert paths.why_unwritable(tmp_path / "run") == f"{tmp_path}: Permission denied"


def test_the_nearest_parent_that_exists(tmp_path):
    assert paths.first_existing(tmp_path / "a" / "b") == tmp_path
    assert paths.first_existing(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (
            "speculative_config={method: ngram, num_speculative_tokens: 3}",
            "speculative decoding is not supported",
        ),
        ("spec_method=ngram", "speculative decoding is not supported"),
        ("spec_tokens=3", "speculative decoding is not supported"),
        ("watermark_config={key: 1}", "changes the sampled distribution"),
        ("reasoning_config={reasoning_parser: qwen3}", "changes the sampled distribution"),
        ("kv_transfer_config={kv_connector: LMCacheConnectorV1}", "a KV cache outside the engine"),
        ("kv_offloading_size=1.0", "a KV cache outside the engine"),
        ("override_generation_config={eos_token_id: 5}", "stop tokens of the model's generation_config"),
        ("generation_config=vllm", "stop tokens of the model's generation_config"),
        ("tokenizer=other", "engines read and write tokens"),
        ("revision=main", "must build the same model"),
        ("runner=pooling", "engines generate"),
        ("worker_cls=my.Worker", "the run sets it"),
        ("enable_expert_parallel=True", "expert parallelism is not built"),
    ],
)
def test_arguments_of_the_engine_that_would_falsify_a_run_are_refused(
    argument: str, reason: str, tmp_path: Path
) -> None:
    name = argument.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.vllm\.{name}=.* is refused: .*{reason}"):
        check_run(make_config(tmp_path, f"actor_rollout_ref.rollout.engine_kwargs.vllm.{argument}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor_rollout_ref.actor.entropy_coeff=0.01"],
            "needs actor_rollout_ref.actor.entropy_coeff=0, got 0.01",
        ),
        (["algorithm.rollout_correction.bypass_mode=True"], "only the decoupled mode computes"),
        (["actor_rollout_ref.rollout.top_k=2"], "must be below 0.69 nats"),
    ],
)
def test_a_target_of_the_entropy_that_nothing_reaches_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    target = "algorithm.adaptive_entropy.target_entropy=1.5"
    with pytest.raises(ConfigError, match=message):
        check_run(make_config(tmp_path, target, *overrides))
    check_run(make_config(tmp_path, target))


def test_offloaded_inputs_need_layers_that_are_recomputed(tmp_path: Path) -> None:
    offload, model = "enable_activation_offload=True", "actor_rollout_ref.model"
    check_run(make_config(tmp_path, f"{model}.{offload}"))
    with pytest.raises(
        ConfigError, match=r"needs actor_rollout_ref\.model\.enable_gradient_checkpointing=True"
    ):
        check_run(make_config(tmp_path, f"{model}.{offload}", f"{model}.enable_gradient_checkpointing=False"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.model.lora_rank=8"], "must be 0 with LoRA"),
        (["actor_rollout_ref.ref.model_path=other"], "needs one model: drop"),
        (["actor_rollout_ref.ref.fsdp_config.fsdp_size=1"], "fsdp_size to be that of the actor, -1, got 1"),
    ],
)
def test_a_reference_that_cannot_become_the_actor_is_not_refreshed(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    refreshed = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.ref.sync_freq=2"]
    with pytest.raises(ConfigError, match=message):
        check_run(make_config(tmp_path, *refreshed, *overrides))
    check_run(make_config(tmp_path, *refreshed))
