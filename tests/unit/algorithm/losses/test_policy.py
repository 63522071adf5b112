"""All policy losses together: golden values, invariances, registration; and the terms beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.algorithm.losses import (
    Aggregation,
    MiniBatchStatistics,
    PolicyLossInputs,
    clean_policy_loss_inputs,
    compute_entropy_loss,
    compute_kl_loss,
    compute_policy_loss,
    mini_batch_statistics,
    read_loss_options,
    register_policy_loss,
    resolve_policy_loss,
)
from verl_rc.config.algorithms import POLICY_LOSSES, LossOptions
from verl_rc.metrics.mergeable import Mean

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "policy_losses.json").read_text())["cases"]
NAMES = tuple(POLICY_LOSSES)
CONFIG = {
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 1.5,
    "policy_loss": {
        "dro_beta": 0.4,
        "kl_cov_ratio": 0.3,
        "clip_cov_ratio": 0.2,
        "clip_cov_lb": -1.0,
        "clip_cov_ub": 5.0,
    },
}


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "case",
    GOLDEN,
    ids=[f"{index}-{case['name']}-{case['loss_agg_mode']}" for index, case in enumerate(GOLDEN)],
)
def test_loss_gradient_and_metrics_equal_golden(case: dict[str, Any]) -> None:
    log_probs = float64(case["log_probs"]).requires_grad_()
    weights = case["rollout_is_weights"]
    loss, metrics = compute_policy_loss(
        case["name"],
        float64(case["old_log_probs"]),
        log_probs,
        float64(case["advantages"]),
        float64(case["response_mask"]),
        rollout_is_weights=None if weights is None else float64(weights),
        config=case["config"],
        aggregation=case["loss_agg_mode"],
    )
    loss.backward()
    expected = case["expected"]
    if POLICY_LOSSES[case["name"]].ppo_kl == "clamped":
        expected["metrics"]["actor/ppo_kl_clamped_fraction"] = (
            0.0  # no golden case has a log-ratio beyond 20 nats
        )
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    torch.testing.assert_close(log_probs.grad, float64(expected["grad"]), rtol=1e-5, atol=1e-7)
    assert {name: metric.value.item() for name, metric in metrics.items()} == pytest.approx(
        expected["metrics"], rel=1e-5, abs=1e-7
    )


def loss_and_gradient(name: str, arguments: dict[str, Any]) -> tuple[float, Tensor, dict[str, Mean[Tensor]]]:
    log_probs = arguments["log_probs"].clone().requires_grad_()
    loss, metrics = compute_policy_loss(name, **{"config": CONFIG, **arguments, "log_probs": log_probs})
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient, dict(metrics)


OTHERS = ("aggregation", "old_log_probs")


def statistics_of_parts(
    name: str, arguments: dict[str, Any], parts: list[Tensor]
) -> MiniBatchStatistics | None:
    """What a trainer computes for a mini-batch from its parts, before the losses."""
    if not POLICY_LOSSES[name].reads_mini_batch:
        return None
    parameters = read_loss_options(CONFIG)
    cleaned = [
        clean_policy_loss_inputs(
            PolicyLossInputs(
                ratio_denominator=arguments["old_log_probs"][rows],
                **{field: arguments[field][rows] for field in arguments if field not in OTHERS},
                denominator_mask=arguments["loss_mask"][rows],
                parameters=parameters,
            )
        )
        for rows in parts
    ]
    return mini_batch_statistics(name, cleaned)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_the_mini_batch(name: str, mode: str, make_batch: Callable[..., Any]) -> None:
    batch = make_batch(seed=3)
    arguments = batch.policy_loss_arguments()
    aggregation = Aggregation(mode, batch.response_mask.sum(), batch.response_mask.any(-1).sum())
    whole, gradient, metrics = loss_and_gradient(name, {**arguments, "aggregation": aggregation})
    parts = [torch.tensor([4, 0, 3]), torch.tensor([1]), torch.tensor([2, 5])]
    statistics = statistics_of_parts(name, arguments, parts)
    losses, gradients, part_metrics = zip(
        *(
            loss_and_gradient(
                name,
                {
                    **{
                        field: torch.nn.functional.pad(tensor[rows], (0, 2))
                        for field, tensor in arguments.items()
                    },
                    "aggregation": aggregation,
                    "mini_batch_statistics": statistics,
                },
            )
            for rows in parts
        ),
        strict=True,
    )
    assert sum(losses) == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(torch.cat([g[:, :-2] for g in gradients]), gradient[torch.cat(parts)])
    for key, metric in metrics.items():
        merged = sum((m[key] for m in part_metrics[1:]), part_metrics[0][key])
        assert merged.value.item() == pytest.approx(metric.value.item(), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_clamped_log_ratios_are_counted_and_others_enter_ppo_kl_as_they_are(name: str) -> None:
    old = float64([[-1.0, -30.0, -26.0, -1.0], [-0.5, -0.5, -0.5, -0.5]])
    current = float64([[-31.0, -1.0, -1.0, -1.5], [-0.5, -0.5, -0.5, -90.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    _, metrics = compute_policy_loss(name, old, current, -torch.ones(2, 4), mask, config=CONFIG)
    gaps = {"clamped": 20 - 20 - 20 + 0.5, "whole": 30 - 29 - 25 + 0.5, "distance": 30 + 29 + 25 + 0.5}
    kind = POLICY_LOSSES[name].ppo_kl
    expected = {} if kind == "none" else {"actor/ppo_kl": pytest.approx(gaps[kind] / 7)}
    if kind == "clamped":
        expected["actor/ppo_kl_clamped_fraction"] = pytest.approx(3 / 7)
    assert {key: value.value.item() for key, value in metrics.items() if "ppo_kl" in key} == expected


@pytest.mark.parametrize("name", NAMES)
def test_fractions_of_clipped_tokens_are_reported_as_the_specification_says(name: str) -> None:
    spec, ratios = POLICY_LOSSES[name], torch.tensor([[9.0, 1.0], [0.1, 1.0], [9.0, 1.0], [0.1, 1.0]])
    advantages = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).expand(4, 2)
    current = float64([[-3.0, -1.0]] * 4)
    old = current - ratios.double().log()
    _, metrics = compute_policy_loss(name, old, current, advantages, torch.ones(4, 2), config=CONFIG)
    texts = {"actor/pg_clipfrac": spec.clipped, "actor/pg_clipfrac_lower": spec.clipped_lower}
    reported = {key: value.value.item() for key, value in metrics.items() if "clipfrac" in key}
    assert reported.keys() == {key for key, text in texts.items() if text is not None}
    assert {key for key in reported if not reported[key]} == {
        key for key, text in texts.items() if text == "no token"
    }


@pytest.mark.parametrize("name", ["kl_cov", "dro"])
def test_penalties_on_the_distance_pull_tokens_back_from_beyond_twenty_nats(name: str) -> None:
    old = float64([[-1.0]])
    for distance, slope in ((-5.0, {"kl_cov": -0.1, "dro": -2.0}), (-30.0, {"kl_cov": -0.1, "dro": -12.0})):
        current = (old + distance).requires_grad_()
        loss, _ = compute_policy_loss(name, old, current, torch.zeros(1, 1), torch.ones(1, 1), config=CONFIG)
        assert torch.autograd.grad(loss, current)[0].item() == pytest.approx(slope[name])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_masks_matters_not_even_nan(name: str, make_batch: Callable[..., Any]) -> None:
    batch = make_batch(seed=4)
    clean = loss_and_gradient(name, batch.policy_loss_arguments())
    outside = ~batch.response_mask
    poisoned = {
        field: tensor.masked_fill(outside, torch.nan) if tensor.is_floating_point() else tensor
        for field, tensor in batch.policy_loss_arguments().items()
    }
    poisoned["rollout_is_weights"] = batch.weights.masked_fill(~batch.loss_mask, torch.nan)
    loss, gradient, metrics = loss_and_gradient(name, poisoned)
    assert loss == clean[0]
    assert torch.equal(gradient, clean[1])
    assert {k: m.value for k, m in metrics.items()} == {k: m.value for k, m in clean[2].items()}
    assert not gradient[~batch.loss_mask].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_rejected_token_without_a_finite_log_prob_leaves_all_gradients_finite(
    name: str, bad: float, make_batch: Callable[..., Any]
) -> None:
    batch = make_batch(seed=5)
    rejected = batch.response_mask & ~batch.loss_mask
    assert rejected[0].any()
    for field in ("old_log_probs", "log_probs"):
        arguments = batch.policy_loss_arguments()
        arguments[field] = arguments[field].masked_fill(rejected, bad)
        loss, gradient, metrics = loss_and_gradient(name, arguments)
        assert torch.isfinite(torch.tensor([loss, *(m.value for m in metrics.values())])).all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_kept_gives_zero_loss_and_zero_gradient(name: str, make_batch: Callable[..., Any]) -> None:
    arguments = make_batch().policy_loss_arguments()
    arguments["loss_mask"] = torch.zeros_like(arguments["loss_mask"])
    loss, gradient, metrics = loss_and_gradient(name, arguments)
    assert loss == 0
    assert not gradient.any()
    assert all(metric.value == 0 for metric in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_one_equal_no_weights_and_carry_no_gradient(
    name: str, make_batch: Callable[..., Any]
) -> None:
    arguments = make_batch().policy_loss_arguments()
    weights = torch.ones_like(arguments["log_probs"]).requires_grad_()
    log_probs = arguments["log_probs"].clone().requires_grad_()
    with_ones, _ = compute_policy_loss(
        name, **{**arguments, "log_probs": log_probs, "rollout_is_weights": weights}, config=CONFIG
    )
    without, _ = compute_policy_loss(name, **{**arguments, "rollout_is_weights": None}, config=CONFIG)
    assert with_ones.item() == pytest.approx(without.item(), rel=1e-9)
    with_ones.backward()
    assert weights.grad is None


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"geo_mean"}))
def test_rejecting_a_token_changes_no_other_tokens_gradient(
    name: str, make_batch: Callable[..., Any]
) -> None:
    batch = make_batch(seed=6)
    arguments = {**batch.policy_loss_arguments(), "loss_mask": batch.response_mask}
    statistics = statistics_of_parts(name, arguments, [torch.arange(6)])
    arguments |= {"mini_batch_statistics": statistics}
    _, before, _ = loss_and_gradient(name, arguments)
    _, after, _ = loss_and_gradient(name, {**arguments, "loss_mask": batch.loss_mask})
    torch.testing.assert_close(after, before * batch.loss_mask)


@pytest.mark.parametrize("name", NAMES)
def test_runs_without_reading_tensors_on_the_host(name: str) -> None:
    with FakeTensorMode():
        tensor = torch.zeros(2, 3)
        loss, _ = compute_policy_loss(
            name, tensor, tensor, tensor, tensor, tensor, tensor, tensor, config=CONFIG
        )
    assert loss.shape == ()


def test_low_precision_log_probs_are_computed_in_float32(make_batch: Callable[..., Any]) -> None:
    arguments = {
        k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in make_batch().__dict__.items()
    }
    loss, _ = compute_policy_loss(
        "vanilla",
        arguments["old_log_probs"],
        arguments["log_probs"],
        arguments["advantages"],
        arguments["loss_mask"],
    )
    assert loss.dtype == torch.float32


def test_denominators_default_to_the_response(make_batch: Callable[..., Any]) -> None:
    batch = make_batch()
    arguments = batch.policy_loss_arguments()
    original = compute_policy_loss("gpg", **arguments)[0].item()
    kept = compute_policy_loss("gpg", **arguments, denominator_mask=batch.loss_mask)[0].item()
    total = (-batch.advantages * batch.log_probs * batch.weights)[batch.loss_mask].sum().item()
    assert original == pytest.approx(total / batch.response_mask.sum().item())
    assert kept == pytest.approx(total / batch.loss_mask.sum().item())


def squared_loss(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Mean[Tensor]]]:
    return inputs.reduce(inputs.log_probs.square()), {}


def test_user_losses_are_found_by_registered_name_and_by_module_and_function() -> None:
    register_policy_loss("squared_for_test")(squared_loss)
    twos, ones = torch.full((1, 2), 2.0), torch.ones(1, 2)
    assert compute_policy_loss("squared_for_test", twos, twos, ones, ones)[0].item() == 4
    given = resolve_policy_loss("verl_rc.algorithm.losses.policy_gradient:gpg_loss")
    assert given.__wrapped__ is resolve_policy_loss("gpg")
    with pytest.raises(ValueError, match="'vanilla' is registered already"):
        register_policy_loss("vanilla")(squared_loss)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ppo", r"loss_mode must be one of vanilla, .*, or 'module:function'; got 'ppo'"),
        ("no_such_module:loss", r"'no_such_module:loss' must name a function in an importable module"),
        ("verl_rc.algorithm.losses.policy_gradient:no_such_loss", "must name a function"),
    ],
)
def test_refuses_names_of_no_loss(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_policy_loss(name)


def loss_alone(inputs: PolicyLossInputs) -> Tensor:
    return inputs.reduce(-inputs.advantages * inputs.log_probs)


def test_refuses_a_loss_without_metrics(make_batch: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"must return the loss and its metrics, .*; it returns a Tensor"):
        compute_policy_loss(f"{__name__}:loss_alone", **make_batch().policy_loss_arguments())


def misspelt(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Mean[Tensor]]]:
    return inputs.reduce(inputs.logprobs), {}  # type: ignore[attr-defined]


def test_names_the_inputs_of_a_loss_that_reads_another(make_batch: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"must read what its inputs have: .*; it reads 'logprobs'"):
        compute_policy_loss(f"{__name__}:misspelt", **make_batch().policy_loss_arguments())


def test_refuses_tensors_of_other_shapes(make_batch: Callable[..., Any]) -> None:
    arguments = make_batch().policy_loss_arguments()
    arguments["advantages"] = arguments["advantages"][:, :1]
    with pytest.raises(ValueError, match=r"like log_probs, \(6, 7\); got \{'advantages': \(6, 1\)\}"):
        compute_policy_loss("vanilla", **arguments)


def test_only_clip_ratio_given_has_an_effect(make_batch: Callable[..., Any]) -> None:
    arguments = make_batch().policy_loss_arguments()
    narrow = compute_policy_loss("vanilla", **arguments, config={"clip_ratio": 0.01})[0]
    explicit = compute_policy_loss(
        "vanilla", **arguments, config={"clip_ratio_low": 0.01, "clip_ratio_high": 0.01}
    )[0]
    wide = compute_policy_loss("vanilla", **arguments, config=LossOptions(clip_ratio_high=0.5))[0]
    assert narrow == explicit
    assert narrow != wide


KEPT = torch.tensor([[1, 0, 1], [0, 0, 0]])
RESPONSE = torch.tensor([[1, 1, 1], [1, 0, 0]])


def test_entropy_runs_over_kept_tokens_and_divides_by_what_is_given() -> None:
    entropy = torch.tensor([[1.0, torch.nan, 4.0], [9.0, torch.nan, 9.0]])
    assert compute_entropy_loss(entropy, KEPT).item() == 2.5
    assert compute_entropy_loss(entropy, KEPT, RESPONSE).item() == 5 / 4
    aggregation = Aggregation("token-mean", num_tokens=10)
    assert compute_entropy_loss(entropy, KEPT, aggregation=aggregation).item() == 0.5


def test_divergence_by_hand_with_its_gradient() -> None:
    log_probs = torch.tensor([[-1.0, torch.nan, -2.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, -1.0], [torch.nan, -1.0, -1.0]])
    loss, metrics = compute_kl_loss(log_probs, reference, "k2", KEPT, RESPONSE)
    loss.backward()
    assert loss.item() == pytest.approx((0.5 * 0.5**2 + 0.5 * 1.0**2) / 4)
    assert metrics["actor/kl_loss"].value.item() == pytest.approx((0.125 + 0.5) / 2)
    assert log_probs.grad.tolist() == [[0.125, 0.0, -0.25], [0.0, 0.0, 0.0]]


def test_entropy_and_divergence_run_without_reading_tensors_on_the_host() -> None:
    with FakeTensorMode():
        ones = torch.ones(2, 3)
        compute_entropy_loss(ones, ones)
        compute_kl_loss(ones, ones, "low_var_kl", ones)
