"""``actor_rollout_ref.model``: verl's defaults, and every field documented."""

from pathlib import Path

import pytest

from verl_rc.config.models import ModelConfig, model_source


def test_defaults_are_verls() -> None:
    section = ModelConfig.model_validate({"path": "m"})
    expected = {"use_remove_padding": True, "enable_gradient_checkpointing": True, "trust_remote_code": False, "lora_rank": 0}
    assert {name: getattr(section, name) for name in expected} == expected


def test_every_field_says_what_it_means() -> None:
    assert all(field.description for field in ModelConfig.model_fields.values())


def test_a_folder_of_the_users_home_is_found_and_a_hub_id_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert model_source("~/model") == str(tmp_path / "model")
    assert model_source("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
