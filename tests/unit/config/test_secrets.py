"""What is written down says everything but passwords and tokens."""

from pathlib import Path

import pytest
import yaml
from small_models import small_run_config

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config, save_resolved_config
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of, looks_secret, override_without_secrets, public_values

ENVIRONMENT = "++ray_kwargs.ray_init.runtime_env.env_vars"


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "hf_token",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "token",
        "OPENAI_KEY",
        "SSH_PRIVATE_KEY_FILE",
        "apikey",
        "api-key",
        "SENTRY_DSN",
        "HTTP_AUTH",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "max_num_batched_tokens",
        "OMP_NUM_THREADS",
        "KEYBOARD",
        "AUTHOR",
        "RAY_AUTH_MODE",
    ],
)
def test_other_names(name: str) -> None:
    assert not looks_secret(name)


def test_secrets_stay_out_of_the_resolved_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run_config(
        tmp_path,
        f"{ENVIRONMENT}.WANDB_API_KEY=abc123",
        f"{ENVIRONMENT}.NCCL_DEBUG=INFO",
        f"{ENVIRONMENT}.PIP_INDEX_URL='https://me:abc123@host.example/simple'",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.hf_token=abc123",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
    )
    saved = save_resolved_config(config, tmp_path)
    assert "abc123" not in saved.read_text()
    tree = yaml.safe_load(saved.read_text())
    assert tree == public_values(config)
    variables = tree["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["PIP_INDEX_URL"] == "https://(hidden)@host.example/simple"
    assert tree["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]["block_size"] == 32
    assert config.ray_kwargs.ray_init.runtime_env["env_vars"]["WANDB_API_KEY"] == "abc123"  # type: ignore[index]
    monkeypatch.setenv("WANDB_API_KEY", "from outside")
    again = load_run_config(["--config-dir", str(tmp_path), "--config-name", saved.stem])
    assert again.ray_kwargs.ray_init.runtime_env["env_vars"]["WANDB_API_KEY"] == "from outside"  # type: ignore[index]


REWARD_KWARGS = "reward.custom_reward_function.reward_kwargs"


def test_a_saved_run_does_not_call_the_users_function_without_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run_config(tmp_path, f"++{REWARD_KWARGS}.judge_key=abc123", f"++{REWARD_KWARGS}.top=3")
    saved = save_resolved_config(config, tmp_path)
    assert "abc123" not in saved.read_text()
    arguments = ["--config-dir", str(tmp_path), "--config-name", saved.stem]
    with pytest.raises(ConfigError, match="judge_key"):
        load_run_config(arguments)
    monkeypatch.setenv("judge_key", "from outside")
    again = load_run_config(arguments).reward.custom_reward_function.reward_kwargs
    assert again == {"judge_key": "from outside", "top": 3}


@pytest.mark.parametrize(
    ("override", "recorded"),
    [
        (f"{ENVIRONMENT}.WANDB_API_KEY=abc123", f"{ENVIRONMENT}.WANDB_API_KEY=(hidden)"),
        (f"{REWARD_KWARGS}={{judge_key:abc123}}", f"{REWARD_KWARGS}=(hidden)"),
        (f"+{REWARD_KWARGS}.judge_key=abc123", f"+{REWARD_KWARGS}.judge_key=(hidden)"),
        ("ray_kwargs.ray_init={runtime_env:{env_vars:{A:b}}}", "ray_kwargs.ray_init=(hidden)"),
        (f"{ENVIRONMENT}.INDEX=https://me:abc123@host/", f"{ENVIRONMENT}.INDEX=https://(hidden)@host/"),
        (f"{ENVIRONMENT}.NCCL_DEBUG=INFO", f"{ENVIRONMENT}.NCCL_DEBUG=INFO"),
        ("trainer.seed=1", "trainer.seed=1"),
    ],
)
def test_the_command_line_that_others_record_has_no_secret(override: str, recorded: str) -> None:
    assert override_without_secrets(override) == recorded


def test_every_mapping_of_the_users_own_is_looked_through() -> None:
    mappings = {key for key, field in fields_of(RunConfig).items() if "Any]" in str(field.annotation)}
    open_keys = {key for key in mappings if override_without_secrets(f"{key}.api_key=1").endswith("(hidden)")}
    thresholds = {f"algorithm.rollout_correction.rollout_{name}_threshold" for name in ("is", "rs")}
    assert mappings - open_keys == {"data.apply_chat_template_kwargs", *thresholds}


def test_without_secrets_nothing_changes(tmp_path: Path) -> None:
    config = small_run_config(tmp_path)
    assert public_values(config) == config.model_dump(mode="json")
