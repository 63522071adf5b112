"""What METHOD may be, and what is said of what it may not be."""

import pytest

from verl_rc.bench.method import find_method


def own_loss(inputs):
    return inputs.reduce(-inputs.advantages * inputs.log_probs), {}


def own_weight(rollout_log_probs, advantages):
    return advantages - rollout_log_probs


def asks_too_much(train_log_probs, entropies, values):
    return train_log_probs + entropies + values


def nothing():
    return None


NUMBER = 3


def test_a_preset_has_the_loss_that_the_trainer_uses():
    assert find_method("decoupled_seq_is").loss == "vanilla"
    method = find_method("bypass_pg_is")
    assert (method.loss, method.correction.rollout_is, method.weight) == ("reinforce", "sequence", None)


def test_a_loss_divides_by_the_policy_that_sampled():
    method = find_method("loss_mode=dro,dro_beta=0.25")
    assert (method.loss, method.options) == ("dro", {"dro_beta": 0.25})
    assert method.correction.bypass_mode
    assert method.correction.loss_type == "ppo_clip"


def test_a_file_has_keys_of_a_correction_and_may_begin_with_a_preset(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "preset: decoupled_geo_rs\nrollout_is: token\nrollout_is_threshold: 0.5_5\n"
        "rollout_token_veto_threshold: 1e-4\nrollout_is_batch_normalize: true\n"
    )
    correction = find_method(str(file)).correction
    assert correction.rollout_rs == "seq_mean_k1"
    assert (correction.weight_threshold().lower, correction.weight_threshold().upper) == (0.5, 5.0)
    assert correction.rollout_token_veto_threshold == 1e-4
    assert correction.rollout_is_batch_normalize


def test_functions_are_told_apart_by_their_arguments():
    loss, weight = (find_method(f"{__name__}:{name}") for name in ("own_loss", "own_weight"))
    assert (loss.loss, loss.weight) == (f"{__name__}:own_loss", None)
    assert weight.loss == "reinforce"
    assert weight.weight(train_log_probs=1, rollout_log_probs=2, response_mask=3, advantages=5) == 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("decoupled_sec_is", r"or module:function; got 'decoupled_sec_is', did you mean decoupled_seq_is\?"),
        ("gspo", r"did you mean loss_mode=gspo\?"),
        ("loss_mode=gpso", r"loss_mode must be one of vanilla, .*; got 'gpso', did you mean gspo\?"),
        ("loss_mode=dro,dro_bet=1", r"must be KEY=VALUE; got 'dro_bet=1', did you mean dro_beta=VALUE\?"),
        ("loss_mode=dro,dro_beta", r"must be KEY=VALUE; got 'dro_beta'"),
        ("no_module_of_mine:loss", r"must name a function in an importable module"),
        (f"{__name__}:NUMBER", r"must be a function of a module; it is 3"),
        (
            f"{__name__}:asks_too_much",
            r"asks for entropies, values, which the exact track lacks; it has train_log_probs, ",
        ),
    ],
)
def test_mistakes_are_one_sentence(text, named):
    with pytest.raises(ValueError, match=named) as raised:
        find_method(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rolout_is: token", r"it has rolout_is, did you mean rollout_is\?"),
        ("- rollout_is", r"must hold keys of algorithm.rollout_correction, one a line"),
        ("rollout_is: tokens", r"mine.yaml: rollout_is .*did you mean token\?"),
        ("preset: decoupled_sec_is", r"did you mean decoupled_seq_is\?"),
        (
            "proximal: interpolate",
            r"proximal=interpolate needs the updates of a step, which the exact track lacks",
        ),
        (
            "rollout_rs: token_k1\nrollout_rs_threshold: 2.0\nrollout_rs_target_acceptance: 0.9",
            r"rollout_rs_target_acceptance=0.9 needs the steps of a run, which the exact track lacks",
        ),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(tmp_path, text, named):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=named) as raised:
        find_method(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(raised.value)
