"""No path of the trainer mixes devices: on tensors that say ``cuda:0`` and compute on the CPU, all of it
runs and gives the CPU's numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_twin import CUDA, DeviceTwin, MixedDevicesError
from small_models import make_tokens, make_train_batch, ragged, small_run_config
from torch import Tensor, nn

from verl_rc.algorithm.losses import Aggregation, mini_batch_statistics
from verl_rc.algorithm.ppo.in_actor import corrected_current, loss_counts, measure_signatures
from verl_rc.algorithm.ppo.objective import policy_objective, statistics_inputs, value_objective
from verl_rc.config import RolloutCorrectionConfig
from verl_rc.config.algorithms import LOSS_MODES, POLICY_LOSSES
from verl_rc.config.models import PolicyLossConfig
from verl_rc.config.rollout_correction_presets import PRESETS
from verl_rc.correction import compute_rollout_correction
from verl_rc.metrics import reduce_metrics
from verl_rc.records.batches import CriticBatch, TrainBatch
from verl_rc.runtime.distributed import sequence_parallel
from verl_rc.runtime.distributed.sequence_parallel import SequenceParallel
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens, score_values
from verl_rc.runtime.workers.language_model import load_causal_lm, load_value_model
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals, score_sequences, select_sequences
from verl_rc.tensor_ops import logprobs

LENGTHS = [7, 2, 5, 0, 1, 6]
MICRO_BATCHES = [[5, 1], [0], [4, 2, 3], []]
TOTALS = Aggregation("token-mean", num_tokens=21, num_sequences=5)
CPU = torch.device("cpu")


def on_both(
    work: Callable[[torch.device], list[Tensor]], modules: list[nn.Module], tolerance: float = 0.0
) -> None:
    """Compare ``work`` on the CPU and on the twin of a GPU, where it must do something."""
    for module in modules:
        module.zero_grad()
    expected = work(CPU)
    for module in modules:
        module.zero_grad()
    with DeviceTwin() as twin:
        for module in modules:
            twin.put([*module.parameters(), *module.buffers()])
        found = work(CUDA)
    assert twin.operations > 10
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head asks a GPU for its memory and compiles for it; the twin has neither."""
    monkeypatch.setattr(logprobs, "_gpu_bytes", lambda device: None)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module")
def model(model_folder: Path) -> nn.Module:
    return load_causal_lm(str(model_folder), torch.float32)


@pytest.fixture(scope="module")
def batch(model: nn.Module) -> TrainBatch:
    batch = make_train_batch(LENGTHS, rejected_rows=(2,))
    with torch.no_grad():
        current = score_tokens(model, batch.tokens, ForwardOptions(), with_entropy=False).log_probs
    noise = 0.2 * torch.randn(current.shape, generator=torch.Generator().manual_seed(7))
    batch.old_log_probs = batch.rollout_log_probs = torch.where(batch.response_mask, current + noise, 0.0)
    batch.reference_log_probs = torch.where(batch.response_mask, current - noise, 0.0)
    return batch


def test_the_twin_is_a_gpu_to_what_runs_on_it() -> None:
    with DeviceTwin() as twin:
        here, there = torch.ones(3), torch.ones(3, device="cuda:0").requires_grad_()
        assert (there.device, there.is_cuda, (2 * there[:1]).device, here.device) == (CUDA, True, CUDA, CPU)
        with pytest.raises(
            MixedDevicesError, match=r"aten\.mul\.Tensor got tensors on cuda:0 and on the CPU"
        ):
            here * there
        (here.to(there.device) * there).cpu().sum().backward()
        assert there.grad is not None
        assert there.grad.device == torch.zeros_like(there).device == there.double().device == CUDA
        with pytest.raises(MixedDevicesError):
            there.grad.add_(here)
    assert there.grad.tolist() == [1, 1, 1]
    assert twin.operations > 0


@pytest.mark.parametrize("remove_padding", [True, False])
def test_scores_without_gradient(remove_padding: bool, model: nn.Module, batch: TrainBatch) -> None:
    options = ForwardOptions(0.7, remove_padding)

    def work(device: torch.device) -> list[Tensor]:
        def score(tokens: Any) -> list[Tensor]:
            scores = score_tokens(model, tokens, options, with_entropy=True, with_sum_pi_squared=True)
            return [scores.log_probs, scores.entropies, scores.sum_pi_squared, scores.varentropies]

        return [
            torch.tensor(column)
            for column in score_sequences(ragged(batch.tokens), MICRO_BATCHES, score, device)
        ]

    on_both(work, [model])


@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_every_policy_loss(
    loss_mode: str, remove_padding: bool, model: nn.Module, batch: TrainBatch, model_folder: Path
) -> None:
    """With entropy and KL terms, an empty micro-batch, and the metrics' way to the CPU."""
    options = {"loss_mode": loss_mode, "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.2}
    given = small_run_config(
        model_folder, "actor_rollout_ref.actor.entropy_coeff=0.01"
    ).actor_rollout_ref.actor
    actor = given.model_copy(
        update={
            "policy_loss": PolicyLossConfig.model_validate(
                {**options, **({"dro_beta": 0.1} if loss_mode == "dro" else {})}
            ),
            "use_kl_loss": True,
        }
    )
    reads_mini_batch = POLICY_LOSSES[loss_mode].reads_mini_batch

    def work(device: torch.device) -> list[Tensor]:
        totals = ObjectiveTotals("actor")
        for rows in MICRO_BATCHES:
            part = select_sequences(ragged(batch), rows, device)
            current = score_tokens(model, part.tokens, ForwardOptions(1.0, remove_padding), with_entropy=True)
            seen = statistics_inputs(part, current.log_probs.detach(), actor, RolloutCorrectionConfig())
            inputs = [seen] if reads_mini_batch else []
            whole = mini_batch_statistics(loss_mode, inputs, lambda x: x, lambda x: x) if inputs else None
            objective = policy_objective(current, part, actor, RolloutCorrectionConfig(), TOTALS, whole)
            objective.loss.backward()
            totals.add(objective)
        return [*gradients_of(model), torch.tensor([*reduce_metrics(totals.metrics(True)).values()])]

    on_both(work, [model])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_correction_in_the_actor_and_in_the_driver(
    preset: str, model: nn.Module, batch: TrainBatch
) -> None:
    config = RolloutCorrectionConfig.from_preset(preset).model_copy(update={"diagnostics": "full"})

    def work(device: torch.device) -> list[Tensor]:
        part = select_sequences(ragged(batch), list(range(len(LENGTHS))), device)
        with torch.no_grad():
            current = score_tokens(
                model, part.tokens, ForwardOptions(), with_entropy=True, with_sum_pi_squared=True
            )
        corrected, statistics = corrected_current(part, current.log_probs, config, 0)
        counts, signatures = loss_counts(corrected), measure_signatures(part, current)
        found = compute_rollout_correction(
            current.log_probs, part.rollout_log_probs, part.response_mask, config, advantages=part.advantages
        )
        weights = [value for value in (found.weights, corrected.rollout_is_weights) if value is not None]
        results = [*weights, found.keep_mask, corrected.loss_mask, statistics.sums, signatures.maxima]
        numbers = [*found.metrics().values(), *counts.tolist()]
        return [*(value.cpu() for value in results), torch.tensor(numbers, dtype=torch.float64)]

    # A CPU measures in smaller parts, whose sums are rounded otherwise.
    on_both(work, [model], tolerance=1e-6)


def test_the_critic(model_folder: Path) -> None:
    model = load_value_model(str(model_folder), torch.float32)
    config = small_run_config(
        model_folder, "algorithm.adv_estimator=gae", f"critic.model.path={model_folder}"
    ).critic
    tokens = make_tokens([1 + row % 6 for row in range(len(LENGTHS))], LENGTHS)
    random = torch.randn(3, len(LENGTHS), 7, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    batch = CriticBatch(
        tokens=tokens,
        response_mask=mask,
        critic_values=random[0],
        returns=random[1],
        batch_size=[len(LENGTHS)],
    )

    def work(device: torch.device) -> list[Tensor]:
        for rows in MICRO_BATCHES:
            part = select_sequences(ragged(batch), rows, device)
            values = score_values(model, part.tokens, ForwardOptions())
            value_objective(values, part, config, TOTALS).loss.backward()
        return gradients_of(model)

    on_both(work, [model])


def test_ranks_that_share_tokens(
    model: nn.Module, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two ranks, whose exchanges give back what it sent: devices are those of a real group, numbers
    are not."""
    monkeypatch.setattr(SequenceParallel, "_exchange", lambda _, parts: parts.contiguous().clone())
    monkeypatch.setattr(sequence_parallel.dist, "all_reduce", lambda tensor, group: None)
    options = ForwardOptions(ranks=SequenceParallel(None, rank=0, size=2))

    def work(device: torch.device) -> list[Tensor]:
        for rows in MICRO_BATCHES[:3]:
            tokens = select_sequences(ragged(batch), rows, device).tokens
            scores = score_tokens(model, tokens, options, with_entropy=True)
            (scores.log_probs.sum() + scores.entropies.sum()).backward()
        return gradients_of(model)

    on_both(work, [model])
