"""Combinations with score centering that are refused, each with what to do."""

from pathlib import Path

import pytest
from small_models import small_run_config, write_small_model
from sound_run import sound_run

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.runtime.workers.supported_models import unsupported_model

ON = "correction=score_centering"
CORRECTION = "algorithm.rollout_correction"
CENTERING = f"{CORRECTION}.score_centering"
TEACHER = ("distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=t")
TEACHERS_LOSS = "distillation.distillation_loss"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([ON, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"], "depends on no other token, got gspo"),
        (
            [ON, "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"],
            "got kl_cov; pass actor_rollout_ref.actor.policy_loss.loss_mode of vanilla, up, ",
        ),
        ([ON, "actor_rollout_ref.actor.policy_loss.loss_mode=my:loss"], "got my:loss"),
        (
            ["correction=topr", f"{CENTERING}.enabled=True"],
            "got algorithm.rollout_correction.loss_type=topr; pass loss_type=ppo_clip or reinforce",
        ),
        (
            [ON, f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5_5.0"],
            "needs rules that reject whole rows, got",
        ),
        (
            [ON, f"{CORRECTION}.bypass_mode=True", "actor_rollout_ref.actor.policy_loss.loss_mode=ipo"],
            "would clip by; pass tail=none",
        ),
        ([ON, "actor_rollout_ref.exact=True"], "is not proven with actor_rollout_ref.exact=True"),
        ([ON, *TEACHER, f"{TEACHERS_LOSS}.use_task_rewards=False"], "use_task_rewards=False turns off"),
        (
            [ON, *TEACHER, f"{TEACHERS_LOSS}.loss_mode=forward_kl_topk"],
            "both ask the actor for further tokens at each place",
        ),
        ([ON, f"{CENTERING}.top_k=0"], "greater than or equal to 1; got 0"),
        ([f"{CENTERING}.top_k=4"], "center nothing: enabled is False"),
        ([f"{CENTERING}.tail=none"], "center nothing: enabled is False"),
        (
            [ON, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_batch_normalize=True"],
            "no mean over the batch; drop one of them",
        ),
    ],
)
def test_what_cannot_be_centered_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config([*sound_run(), *overrides])
    assert said in str(caught.value)


@pytest.mark.parametrize("loss", ["vanilla", "cispo", "ipo", "dro"])
def test_losses_of_single_tokens_are_centered_in_both_modes(loss: str) -> None:
    chosen = f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"
    needed = ["actor_rollout_ref.actor.policy_loss.dro_beta=0.1"] if loss == "dro" else []
    for mode in ("False", "True"):
        bypass = f"algorithm.rollout_correction.bypass_mode={mode}"
        tail = [f"{CENTERING}.tail=none"] if loss == "ipo" else []
        config = load_run_config([*sound_run(), ON, chosen, bypass, *needed, *tail])
        assert config.algorithm.rollout_correction.head_tokens == 32


def test_a_head_beyond_the_vocabulary_is_refused_with_its_size(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path)
    centered = f"{CENTERING}.enabled=True"
    for size, said in ((29, None), (30, "top_k=30 must be at most the 29 tokens")):
        config = small_run_config(folder, centered, f"{CENTERING}.top_k={size}")
        problem = unsupported_model(config, str(folder), trust_remote_code=False)
        assert problem is said is None or (said is not None and said in str(problem))
