"""``data``: verl's defaults, and every field documented."""

from verl_rc.config.task import DataConfig


def test_defaults_are_verls() -> None:
    section = DataConfig.model_validate({"train_files": ["a"], "val_files": ["b"]})
    expected = {
        "train_batch_size": 1024,
        "val_batch_size": None,
        "max_prompt_length": 512,
        "max_response_length": 512,
        "prompt_key": "prompt",
        "shuffle": True,
        "seed": None,
        "filter_overlong_prompts": False,
        "truncation": "error",
        "train_max_samples": -1,
        "val_max_samples": -1,
    }
    assert {name: getattr(section, name) for name in expected} == expected


def test_every_field_says_what_it_means() -> None:
    assert all(field.description for field in DataConfig.model_fields.values())
