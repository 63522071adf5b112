"""The golden bypass losses through the actor's own update code, cut into micro-batches; the interpolated
proximal policy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from bypass_cases import CASES, case_batch, case_config, case_id, with_verl_names
from small_models import ragged, small_run_config
from two_processes import free_port

from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.in_actor import Corrected
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction
from verl_rc.metrics import reduce_metrics
from verl_rc.records.batches import TokenScores, TrainBatch
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.weight_sync.proof import LogProbGap, SyncProofError
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.policy_worker import PolicyWorker
from verl_rc.runtime.workers.updates import UpdateRequest


class TablePolicy(PolicyWorker):
    """An actor whose current log-probs are a table: a row's number is its first prompt token."""

    table: torch.Tensor
    asked_for_squares: list[bool]
    """Of every forward pass."""

    def score(
        self, part: TrainBatch, with_entropy: bool = False, with_sum_pi_squared: bool = False
    ) -> TokenScores:
        del with_entropy
        self.asked_for_squares.append(with_sum_pi_squared)
        log_probs = self.table[part.tokens.prompts[:, 0]]
        zeros = torch.zeros_like(log_probs)
        return TokenScores(log_probs, zeros, zeros if with_sum_pi_squared else None)


@pytest.fixture(scope="module")
def worker(model_folder: Path) -> Iterator[TablePolicy]:
    worker = TablePolicy(
        small_run_config(model_folder), RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=1
    )
    worker.asked_for_squares = []
    yield worker
    worker.close()


def numbered_batch(case: dict[str, Any]) -> TrainBatch:
    batch = case_batch(case)
    batch.tokens.prompts[:, 0] = torch.arange(batch.batch_size[0])
    return batch


@pytest.mark.parametrize(
    "micro_batches", [[[0, 1, 2, 3, 4, 5]], [[3, 0], [5], [1, 2, 4], []]], ids=["whole", "in_parts"]
)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_golden_gradient_and_metrics(
    worker: TablePolicy, case: dict[str, Any], micro_batches: list[list[int]]
) -> None:
    batch, expected = numbered_batch(case), case["expected"]
    worker._correction = case_config(case)
    worker._actor = worker._actor.model_copy(update={"loss_agg_mode": case["loss_agg_mode"]})
    worker.table = torch.tensor(case["log_probs"]).requires_grad_()
    correction = corrector_of(worker._correction).during_update(0, 1, worker._ranks)
    counted = batch.response_mask.sum(-1)
    share = MiniBatch(micro_batches, int(counted.sum()), int((counted > 0).sum()), int(counted.sum()))
    worker.accumulate(ragged(batch), share, ObjectiveTotals("actor"), correction)
    torch.testing.assert_close(worker.table.grad, torch.tensor(expected["grad"]), rtol=1e-5, atol=1e-7)
    assert correction.end_mini_batch(share, 0) == int(
        (torch.tensor(expected["keep_mask"]).bool() & batch.response_mask).sum()
    )
    measured = correction.measured()
    assert measured is not None
    metrics = with_verl_names(measured.statistics.metrics(worker._correction), worker._correction)
    for name, value in expected["metrics"].items():
        if name.startswith("rollout_corr/"):
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["config"]["loss_type"] == "reinforce"], ids=case_id
)
def test_one_decoupled_update_has_the_gradient_of_bypass_without_clip(
    worker: TablePolicy, case: dict[str, Any]
) -> None:
    """What ``explain`` says where a step is one update: bypass_mode with loss_type=reinforce saves the
    forward pass."""
    batch, table = numbered_batch(case), torch.tensor(case["log_probs"])
    config = case_config(case).model_copy(update={"bypass_mode": False})
    corrected = compute_rollout_correction(table, batch.rollout_log_probs, batch.response_mask, config)
    kept = corrected.keep_mask & batch.response_mask
    batch.old_log_probs, batch.loss_mask = table, kept
    batch.rollout_is_weights = None if corrected.weights is None else corrected.weights.float()
    worker._correction = config
    worker._actor = worker._actor.model_copy(update={"loss_agg_mode": case["loss_agg_mode"]})
    worker.table = table.clone().requires_grad_()
    counted = kept if config.rejection_denominator == "kept" else batch.response_mask
    rows = int(counted.any(dim=-1).sum())
    share = MiniBatch([[0, 1, 2, 3, 4, 5]], int(counted.sum()), rows, int(kept.sum()))
    worker.accumulate(ragged(batch), share, ObjectiveTotals("actor"), Corrected())
    torch.testing.assert_close(
        worker.table.grad, torch.tensor(case["expected"]["grad"]), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("first", [[0, 1, 2], [3, 4, 5]])
def test_the_gap_is_that_before_an_update_or_none(worker: TablePolicy, first: list[int]) -> None:
    """Rows 0 to 2 have no finite log-prob of the engine, and are trained on; the others are far off."""
    case = CASES[0]
    batch = numbered_batch(case)
    batch.rollout_log_probs[:3] = torch.nan
    changes = {"nonfinite_logprob": "neutral", "nonfinite_stop_fraction": 1.0}
    worker._correction = case_config(case).model_copy(update=changes)
    worker.table = torch.tensor(case["log_probs"]).requires_grad_()
    shares = []
    for rows in (first, [row for row in range(6) if row not in first]):
        counted = batch.response_mask[rows].sum(-1)
        shares.append(MiniBatch([rows], int(counted.sum()), 3, int(counted.sum())))
    request = UpdateRequest(corrector_of(worker._correction), 0, gap_limit=1e-3)
    if first == [0, 1, 2]:
        measured = worker.update(ragged(batch), shares, request).measured
        assert measured is not None
        assert LogProbGap.from_statistics(measured.before_update) is None
        return
    with pytest.raises(SyncProofError, match="this step's rollouts"):
        worker.update(ragged(batch), shares, request)


def test_a_gap_that_is_no_rounding_stops_before_the_weights_change(worker: TablePolicy) -> None:
    case = CASES[0]
    batch = numbered_batch(case)
    worker._correction = case_config(case)
    worker.table = torch.tensor(case["log_probs"]).requires_grad_()
    before = [parameter.full_tensor().clone() for parameter in worker.model.module.parameters()]
    counted = batch.response_mask.sum(-1)
    share = MiniBatch([[0, 1, 2, 3, 4, 5]], int(counted.sum()), 6, int(counted.sum()))
    with pytest.raises(SyncProofError, match="this step's rollouts"):
        worker.update(
            ragged(batch), [share], UpdateRequest(corrector_of(worker._correction), 0, gap_limit=1e-3)
        )
    after = [parameter.full_tensor() for parameter in worker.model.module.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("parts", [[slice(0, 6)], [slice(0, 1), slice(1, 6)]], ids=["whole", "in_parts"])
def test_signatures_are_those_of_the_first_mini_batch(worker: TablePolicy, parts: list[slice]) -> None:
    case = CASES[0]
    config, batch = RolloutCorrectionConfig(bypass_mode=True, diagnostics="full"), case_batch(case)
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor(case["log_probs"])
    entropies, squares, varentropies = (
        torch.rand(3, *table.shape, generator=generator) + torch.tensor([0, 1, 0])[:, None, None]
    )
    batch.engines = torch.arange(len(table)) % 2
    correction = corrector_of(config).during_update(0, 1, worker._ranks)
    for moved in (0.0, 0.7):  # the second one comes after an update
        for rows in parts:
            current = TokenScores(table[rows] + moved, entropies[rows], squares[rows], varentropies[rows])
            correction.correct(cast(TrainBatch, batch[rows]), current)
        correction.end_mini_batch(MiniBatch([], 0, 0, 0), 0)
    decoupled = compute_rollout_correction(
        table,
        batch.rollout_log_probs,
        batch.response_mask,
        RolloutCorrectionConfig(diagnostics="full"),
        entropies=entropies,
        sum_pi_squared=squares,
        varentropies=varentropies,
        engines=batch.engines,
    ).metrics()
    found = correction.measured()
    assert found is not None
    assert found.signatures is not None
    signatures = found.signatures.signatures()
    measured = ("engine_1_logit_noise", "surprisal_excess_bound", "missing_mass")
    assert {f"rollout_corr/{name}" for name in measured} <= signatures.keys()
    assert signatures == pytest.approx({name: decoupled[name] for name in signatures}, rel=1e-9)
    core = corrector_of(config.model_copy(update={"diagnostics": "core"}))
    assert not core.during_update(0, 1, worker._ranks).reads_squares


@pytest.mark.parametrize("diagnostics", ["core", "full"])
def test_sums_of_squared_probabilities_are_computed_for_the_first_mini_batch_alone(
    worker: TablePolicy, diagnostics: str
) -> None:
    case = CASES[0]
    batch = numbered_batch(case)
    worker._correction = RolloutCorrectionConfig.model_validate(
        {"bypass_mode": True, "diagnostics": diagnostics}
    )
    worker.table = torch.tensor(case["log_probs"]).requires_grad_()
    counted = batch.response_mask.sum(-1)
    share = MiniBatch([[0, 1, 2], [3, 4, 5]], int(counted.sum()), 6, int(counted.sum()))
    worker.asked_for_squares.clear()
    worker.update(ragged(batch), [share, share], UpdateRequest(corrector_of(worker._correction), 0))
    assert worker.asked_for_squares == [diagnostics == "full"] * 2 + [False] * 2


@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_tokens_that_the_driver_left_out_have_no_gradient_and_are_not_counted(
    worker: TablePolicy, denominator: str
) -> None:
    """As those that are older than ``max_token_age``. With kept tokens as denominator the gradients of the
    others grow by what is missing below."""
    case = next(case for case in CASES if case["config"]["rollout_rs"] is None)
    worker._actor = worker._actor.model_copy(update={"loss_agg_mode": "token-mean"})
    gradients, counts = [], []
    for left_out in (False, True):
        batch = numbered_batch(case)
        rule = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.001_1000"}  # it rejects nothing
        fields = {**case_config(case).model_dump(), **rule, "rejection_denominator": denominator}
        worker._correction = RolloutCorrectionConfig.model_validate(fields)
        worker.table = torch.tensor(case["log_probs"]).requires_grad_()
        batch.loss_mask = batch.response_mask.clone()
        batch.loss_mask[0] &= not left_out
        counted = batch.response_mask.sum(-1)
        share = MiniBatch([[0, 1, 2], [3, 4, 5]], int(counted.sum()), 6, int(batch.loss_mask.sum()))
        report = worker.update(ragged(batch), [share], UpdateRequest(corrector_of(worker._correction), 0))
        gradients.append(worker.table.grad)
        counts.append((report.loss_tokens, int(batch.loss_mask.sum())))
    assert [kept for kept, _ in counts] == [[expected] for _, expected in counts]
    assert gradients[1][0].abs().max() == 0
    growth = counts[0][1] / counts[1][1] if denominator == "kept" else 1.0
    torch.testing.assert_close(gradients[1][1:], growth * gradients[0][1:], rtol=1e-5, atol=1e-8)


def test_a_mini_batch_of_which_nothing_is_kept_is_skipped(worker: TablePolicy) -> None:
    case = next(case for case in CASES if case["config"]["rollout_rs"] == "seq_mean_k1")
    batch = numbered_batch(case)
    worker._correction = case_config(case)
    worker.table = torch.tensor(case["log_probs"]).add(3.0).requires_grad_()
    counted = batch.response_mask.sum(-1)
    share = MiniBatch([[0, 1, 2, 3, 4, 5]], int(counted.sum()), 6, int(counted.sum()))
    report = worker.update(ragged(batch), [share], UpdateRequest(corrector_of(worker._correction), 0))
    assert report.loss_tokens == [0]
    assert {metric.name: metric.value for metric in report.metrics}["rollout_corr/skipped_updates"] == 1


def test_the_proximal_policy_is_interpolated_by_the_updates_of_the_step(worker: TablePolicy) -> None:
    """The current policy stays here; in the second of two updates tokens of the step before are at 2/3, newer
    ones at 0."""
    batch = numbered_batch(CASES[0])
    worker._correction = RolloutCorrectionConfig(proximal="interpolate", rollout_is="token")
    worker.table = torch.tensor(CASES[0]["log_probs"]).requires_grad_()
    rows, width = batch.response_mask.shape
    batch.policy_versions = (
        torch.where(torch.arange(rows)[:, None] % 2 == 0, 48, 49).expand(rows, width).contiguous()
    )
    batch.old_log_probs = batch.rollout_log_probs + 0.25
    counted = batch.response_mask.sum(-1)
    share = MiniBatch([list(range(rows))], int(counted.sum()), rows, int(counted.sum()))
    request = UpdateRequest(corrector_of(worker._correction), 49)
    report = worker.update(ragged(batch), [share, share], request)
    gaps = []
    for row, column in batch.response_mask.nonzero().tolist():
        current, rollout = CASES[0]["log_probs"][row][column], CASES[0]["rollout_log_probs"][row][column]
        for part in (1.0, 2 / 3 if row % 2 == 0 else 0.0):
            gaps.append(abs(rollout + part * (current - rollout) - (rollout + 0.25)))
    found = reduce_metrics(report.metrics)
    assert found["actor/proximal_interpolation_gap"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)
    request = UpdateRequest(corrector_of(worker._correction), 50)  # most steps recompute nothing
    metrics = worker.update(ragged(batch), [share], request).metrics
    assert "actor/proximal_interpolation_gap" not in {metric.name for metric in metrics}
    assert report.measured is not None
