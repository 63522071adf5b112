"""``actor_rollout_ref.actor``: verl's defaults, and every field documented."""

from verl_rc.config.models import ActorConfig


def test_defaults_are_verls() -> None:
    section = ActorConfig.model_validate({"use_dynamic_bsz": True})
    expected = {
        "ppo_mini_batch_size": 256,
        "ppo_max_token_len_per_gpu": 16384,
        "ppo_epochs": 1,
        "shuffle": False,
        "clip_ratio": 0.2,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "entropy_coeff": 0.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
    }
    assert {name: getattr(section, name) for name in expected} == expected


def test_every_field_says_what_it_means() -> None:
    assert all(field.description for field in ActorConfig.model_fields.values())
