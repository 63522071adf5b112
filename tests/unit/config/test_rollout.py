"""``actor_rollout_ref.rollout``: verl's defaults, and every field documented."""

from verl_rc.config.rollout import RolloutConfig


def test_defaults_are_verls() -> None:
    section = RolloutConfig.model_validate({})
    expected = {
        "n": 1,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "tensor_model_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": False,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "dtype": "bfloat16",
        "calculate_log_probs": True,
        "ignore_eos": False,
        "seed": 42,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
    }
    assert {name: getattr(section, name) for name in expected} == expected


def test_every_field_says_what_it_means() -> None:
    assert all(field.description for field in RolloutConfig.model_fields.values())
