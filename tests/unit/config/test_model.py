"""``actor_rollout_ref.model``: verl's defaults, and every field documented."""

from verl_rc.config.model import ModelConfig


def test_defaults_are_verls() -> None:
    section = ModelConfig.model_validate({"path": "m"})
    expected = {"use_remove_padding": True, "enable_gradient_checkpointing": True, "trust_remote_code": False, "lora_rank": 0}
    assert {name: getattr(section, name) for name in expected} == expected


def test_every_field_says_what_it_means() -> None:
    assert all(field.description for field in ModelConfig.model_fields.values())
