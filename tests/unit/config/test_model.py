"""A model is a folder of the user or a name on the hub."""

from pathlib import Path

import pytest

from verl_rc.config.models import model_source


def test_a_folder_of_the_users_home_is_found_and_a_hub_id_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert model_source("~/model") == str(tmp_path / "model")
    assert model_source("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
