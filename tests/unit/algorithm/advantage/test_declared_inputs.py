"""An estimator of a user's own gets what it declares, and a sentence when it reads anything else."""

import pytest
import torch
from functions_of_a_user import loss_of_covariances
from sound_run import sound_run

from verl_rc.algorithm.advantage import compute_advantages
from verl_rc.algorithm.losses import compute_policy_loss
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config

NAME = "functions_of_a_user:above_the_critic"
ONES = torch.ones(2, 3)


def test_a_run_computes_what_an_estimator_declares():
    config = load_run_config([*sound_run(NAME), "algorithm.adv_estimator_inputs=[values,sum_pi_squared]"])
    assert config.needs_critic
    assert config.algorithm.estimator_reads("sum_pi_squared")
    assert not config.algorithm.estimator_reads("reward_baselines")
    assert not load_run_config(sound_run(NAME)).needs_critic


def test_an_estimator_with_a_name_declares_nothing():
    with pytest.raises(ConfigError, match="adv_estimator_inputs declares what a module:function"):
        load_run_config([*sound_run("grpo"), "algorithm.adv_estimator_inputs=[values]"])


def test_an_input_that_no_run_has_is_refused():
    with pytest.raises(ConfigError, match="adv_estimator_inputs"):
        load_run_config([*sound_run(NAME), "algorithm.adv_estimator_inputs=[entropies]"])


def test_a_declared_input_arrives():
    advantages, _ = compute_advantages(NAME, 3 * ONES, ONES, values=2 * ONES)
    assert torch.equal(advantages, ONES)


def test_an_input_that_was_not_declared_is_named():
    message = r"(?s)must read only what it is given.*no .*values.*adv_estimator_inputs=\[values\]"
    with pytest.raises(ValueError, match=message):
        compute_advantages(NAME, ONES, ONES)


def test_a_loss_that_reads_what_no_run_gives_it_is_named():
    message = r"(?s)policy loss .* must read only what it is given.*mini_batch_statistics only for losses"
    with pytest.raises(ValueError, match=message):
        compute_policy_loss(f"functions_of_a_user:{loss_of_covariances.__name__}", ONES, ONES, ONES, ONES)
