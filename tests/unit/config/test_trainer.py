"""``trainer``: verl's defaults, and every field documented."""

from verl_rc.config.run import TrainerConfig


def test_defaults_are_verls() -> None:
    section = TrainerConfig.model_validate({})
    expected = {
        "total_epochs": 30,
        "total_training_steps": None,
        "logger": ["console", "wandb"],
        "nnodes": 1,
        "n_gpus_per_node": 8,
        "save_freq": -1,
        "test_freq": -1,
        "val_before_train": True,
        "val_only": False,
        "log_val_generations": 0,
    }
    assert {name: getattr(section, name) for name in expected} == expected


def test_every_field_says_what_it_means() -> None:
    assert all(field.description for field in TrainerConfig.model_fields.values())
