"""Ranks that share a row: sizes and budgets that do not fit are refused before anything loads, with the
number that would fit."""

import re
from pathlib import Path

import pytest
from small_models import small_run_config, write_small_model

from verl_rc.config.errors import ConfigError
from verl_rc.runtime.workers.supported_models import unsupported_model

ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
SIZE = "fsdp_config.ulysses_sequence_parallel_size"
GAE = "algorithm.adv_estimator=gae"
SIX = ("trainer.n_gpus_per_node=6", "data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=6")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((f"{ACTOR}.{SIZE}=3",), None),
        ((f"{ACTOR}.{SIZE}=4",), f"{ACTOR}.{SIZE}=4 must divide the 6 trainer ranks .* Pass 3."),
        ((f"{ACTOR}.{SIZE}=12",), f"{ACTOR}.{SIZE}=12 must divide the 6 trainer ranks .* Pass 6."),
        ((f"{CRITIC}.{SIZE}=5", GAE), f"{CRITIC}.{SIZE}=5 must divide the 6 .* Pass 3."),
        ((f"{CRITIC}.{SIZE}=5",), None),  # there is no critic
        ((f"{REF}.{SIZE}=4", f"{ACTOR}.use_kl_loss=True"), f"{REF}.{SIZE}=4 must divide the 6 .* Pass 3."),
        (
            (f"{ACTOR}.{SIZE}=2", "actor_rollout_ref.model.use_remove_padding=False"),
            f"{ACTOR}.{SIZE}=2 divides packed tokens, but actor_rollout_ref.model.use_remove_padding=False",
        ),
        (
            (f"{CRITIC}.{SIZE}=2", GAE, "actor_rollout_ref.model.use_remove_padding=False"),
            f"{CRITIC}.{SIZE}=2 divides packed tokens, but actor_rollout_ref.model.use_remove_padding=False",
        ),
        (
            (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=7", f"{ACTOR}.{SIZE}=2"),
            None,
        ),
        (
            (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=6", f"{ACTOR}.{SIZE}=2"),
            f"{ACTOR}.ppo_max_token_len_per_gpu must hold .* = 13.*, got 6 on each of the 2 ranks that share "
            "a row. Pass 7.$",
        ),
    ],
)
def test_sizes(overrides: tuple[str, ...], said: str | None, tmp_path: Path) -> None:
    if said is None:
        small_run_config(tmp_path, *SIX, *overrides)
    else:
        with pytest.raises(ConfigError, match=said):
            small_run_config(tmp_path, *SIX, *overrides)


def test_each_group_gets_a_row(tmp_path: Path) -> None:
    few = (
        "actor_rollout_ref.rollout.n=1",
        "algorithm.adv_estimator=reinforce_plus_plus",
        f"{ACTOR}.ppo_mini_batch_size=3",
    )
    with pytest.raises(ConfigError, match="each of the 6 trainer ranks"):
        small_run_config(tmp_path, *SIX, *few)
    small_run_config(tmp_path, *SIX, *few, f"{ACTOR}.{SIZE}=2")
    with pytest.raises(ConfigError, match=r"critic.ppo_mini_batch_size .* each of the 6 trainer ranks"):
        small_run_config(tmp_path, *SIX, *few, f"{ACTOR}.{SIZE}=2", "critic.enable=True")


def test_the_reference_follows_the_actor_unless_it_says_otherwise(tmp_path: Path) -> None:
    shared = (*SIX, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.{SIZE}=3")
    assert small_run_config(tmp_path, *shared).sequence_parallel_sizes == {"actor": 3, "reference": 3}
    assert small_run_config(tmp_path, *shared, f"{REF}.{SIZE}=1").sequence_parallel_sizes == {
        "actor": 3,
        "reference": 1,
    }
    assert small_run_config(tmp_path, *SIX, GAE, f"{CRITIC}.{SIZE}=2").sequence_parallel_sizes == {
        "actor": 1,
        "critic": 2,
    }


def test_verls_older_names_are_the_same_keys(tmp_path: Path) -> None:
    older = [
        f"{role}.ulysses_sequence_parallel_size={size}" for role, size in ((ACTOR, 3), (CRITIC, 2), (REF, 6))
    ]
    config = small_run_config(tmp_path, *SIX, *older, GAE, f"{ACTOR}.use_kl_loss=True")
    assert config.sequence_parallel_sizes == {"actor": 3, "critic": 2, "reference": 6}


def test_heads_must_divide_too(tmp_path: Path) -> None:
    """The model has 4 heads of queries, and 2 of keys, which are repeated."""
    folder = write_small_model(tmp_path)
    for size, fits in ((2, None), (4, None), (3, 2), (6, 4)):
        config = small_run_config(
            folder,
            "trainer.n_gpus_per_node=12",
            "data.train_batch_size=12",
            f"{ACTOR}.ppo_mini_batch_size=12",
            f"{ACTOR}.{SIZE}={size}",
        )
        problem = unsupported_model(config, str(folder), trust_remote_code=False)
        if fits is None:
            assert problem is None
        else:
            assert problem is not None
            assert re.match(
                rf"{ACTOR}.{SIZE}={size} must divide its 4 attention heads: pass {fits},", problem
            )
