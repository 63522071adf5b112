"""The configuration in a run's folder, which may be somebody else's, does not decide what code may run."""

from pathlib import Path

import pytest
from small_checkpoints import write_tiny_model
from small_models import small_run_config

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import save_resolved_config
from verl_rc.insight.replay.weights import config_of

MODEL, DATA = "actor_rollout_ref.model.trust_remote_code", "data.trust_remote_code"


@pytest.mark.parametrize("key", [MODEL, DATA])
def test_code_of_a_model_runs_only_where_the_user_trusts_it(tmp_path: Path, key: str) -> None:
    config = small_run_config(write_tiny_model(tmp_path / "model"), f"{key}=True")
    save_resolved_config(config, tmp_path)
    with pytest.raises(ConfigError, match="Pass --trust-remote-code"):
        config_of(tmp_path)
    assert config_of(tmp_path, trust_remote_code=True) == config
