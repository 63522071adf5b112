"""The gradient of one actor rank does not depend on how its rows are cut, packed or padded; the memory it
reports."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from host_reads import HostReads
from small_models import VOCABULARY, add_heads, make_train_batch, ragged, scored, small_run_config

from verl_rc.algorithm.losses import AGGREGATION_MODES
from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.in_actor import Corrected
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.algorithm.ppo.objective import Objective
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.metrics import reduce_metrics
from verl_rc.records.batches import TrainBatch, positions_mask
from verl_rc.records.heads import heads
from verl_rc.records.microbatch import MicroBatchLimit, assign_rows
from verl_rc.records.optimizer_step import OptimizerStep
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers.forward import ForwardOptions
from verl_rc.runtime.workers.host import host_memory
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.policy_worker import PolicyWorker, memory_metrics
from verl_rc.runtime.workers.updates import UpdateRequest

LENGTHS = [7, 2, 5, 0, 1, 6]
REJECTED = (2, 5)


@pytest.fixture(scope="module")
def worker(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyWorker]:
    full, actor = "algorithm.rollout_correction.diagnostics=full", "actor_rollout_ref.actor"
    config = small_run_config(model_folder, f"{actor}.entropy_coeff=0.05", f"{actor}.optim.lr=0.01", full)
    port = 29_000 + hash(str(tmp_path_factory.getbasetemp())) % 500
    worker = PolicyWorker(config, RankAddress(0, 1, "127.0.0.1", port), total_steps=10)
    yield worker
    worker.close()


def gradient(worker: PolicyWorker, batch: TrainBatch, micro_batches: list[list[int]]) -> torch.Tensor:
    kept = batch.response_mask.sum(-1)
    share = MiniBatch(micro_batches, int(kept.sum()), int((kept > 0).sum()), int(batch.loss_mask.sum()))
    worker.accumulate(ragged(batch), share, ObjectiveTotals("actor"), Corrected())
    flat = torch.cat([p.grad.full_tensor().flatten() for p in worker.model.module.parameters()]).double()  # type: ignore[union-attr]
    worker.model.optimizer.zero_grad()
    return flat


def assert_same_gradient(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.norm() > 0
    assert float((actual - expected).norm() / expected.norm()) <= 1e-5


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize(
    "limit",
    [MicroBatchLimit(max_rows=1), MicroBatchLimit(max_rows=4), MicroBatchLimit(max_tokens=13)],
    ids=str,
)
def test_micro_batches_do_not_change_the_gradient(
    worker: PolicyWorker, mode: str, limit: MicroBatchLimit
) -> None:
    worker._actor = worker._actor.model_copy(update={"loss_agg_mode": mode})
    batch = make_train_batch(LENGTHS, REJECTED)
    whole = gradient(worker, batch, [list(range(len(LENGTHS)))])
    [micro_batches] = assign_rows(batch.tokens.sequence_lengths.tolist(), 1, limit)
    assert len(micro_batches) > 1
    assert_same_gradient(gradient(worker, batch, [*micro_batches, []]), whole)


def test_a_steps_weight_of_the_entropy_multiplies_its_gradient(worker: PolicyWorker) -> None:
    configured, batch = worker._actor, make_train_batch(LENGTHS, REJECTED)

    def of(coefficient: float | None) -> torch.Tensor:
        request = UpdateRequest(corrector_of(worker._correction), 0, entropy_coeff=coefficient)
        worker._actor = request.options_of_step(configured)
        try:
            return gradient(worker, batch, [list(range(len(LENGTHS)))])
        finally:
            worker._actor = configured

    without = of(0.0)
    assert_same_gradient(of(0.3) - without, 0.3 * (of(1.0) - without))
    assert torch.equal(of(None), of(0.05))


@pytest.mark.parametrize("fields", [{}, {"bypass_mode": True}])
@pytest.mark.parametrize("rollout_is", [None, "token"])
def test_a_centered_loss_is_the_same_in_parts_and_padded(
    worker: PolicyWorker, fields: dict[str, object], rollout_is: str | None
) -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    add_heads(batch, VOCABULARY)
    plain, options = worker._correction, worker._forward
    centering = {"enabled": True, "top_k": 4}
    loss = {"loss_type": "reinforce"} if fields and rollout_is else {}
    correction = {**fields, **loss, "rollout_is": rollout_is, "score_centering": centering}
    worker._correction = RolloutCorrectionConfig.model_validate(correction)
    whole = gradient(worker, batch, [list(range(len(LENGTHS)))])
    parts = gradient(worker, batch, [[3, 0], [5], [1, 2, 4], []])
    worker._forward = ForwardOptions(1.0, remove_padding=False)
    padded = gradient(worker, batch, [list(range(len(LENGTHS)))])
    worker._correction, worker._forward = plain, options
    uncentered = gradient(worker, batch, [list(range(len(LENGTHS)))])
    assert_same_gradient(parts, whole)
    assert_same_gradient(padded, whole)
    assert float((uncentered - whole).norm() / whole.norm()) > 1e-3


def test_what_centering_adds_to_the_gradient_is_that_of_whole_distributions(worker: PolicyWorker) -> None:
    """A (Σ q log p + (1 - Q) log(1 - P)) over the head, from all logits of the model, row by row."""
    worker._actor = worker._actor.model_copy(update={"loss_agg_mode": "token-mean"})
    batch = make_train_batch(LENGTHS)
    batch.rollout_is_weights = None
    add_heads(batch, VOCABULARY)
    assert batch.tokens.head_counts is not None
    assert batch.tokens.head_ids is not None
    ids, q_logs = heads(batch.tokens.head_counts, batch.tokens.head_ids)
    plain, rows = worker._correction, [list(range(len(LENGTHS)))]
    worker._correction = RolloutCorrectionConfig.model_validate({"score_centering": {"enabled": True}})
    centered = gradient(worker, batch, rows)
    worker._correction = plain
    uncentered = gradient(worker, batch, rows)
    terms, module = [], worker.model.module
    for row, length in enumerate(LENGTHS):
        prompt = batch.tokens.prompts[row, 6 - int(batch.tokens.prompt_lengths[row]) :]
        token_ids = torch.cat([prompt, batch.tokens.responses[row, :length]])[None]
        logits = module(input_ids=token_ids, use_cache=False).logits[0].log_softmax(-1)
        for place in range(length):
            is_there = ids[row, place] >= 0
            if not is_there.any():
                continue
            q, p = (
                q_logs[row, place][is_there].exp(),
                logits[len(prompt) + place - 1][ids[row, place][is_there]],
            )
            expected = (q * p).sum() + (1 - q.sum()) * (1 - p.exp().sum()).log()
            terms.append(batch.advantages[row, place] * expected)
    (torch.stack(terms).sum() / sum(LENGTHS)).backward()
    brute = torch.cat([p.grad.full_tensor().flatten() for p in module.parameters()]).double()  # type: ignore[union-attr]
    worker.model.optimizer.zero_grad()
    assert_same_gradient(centered - uncentered, brute)


def test_padding_instead_of_packing_does_not_change_the_gradient(worker: PolicyWorker) -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    packed = gradient(worker, batch, [list(range(len(LENGTHS)))])
    options, worker._forward = worker._forward, ForwardOptions(1.0, remove_padding=False)
    padded = gradient(worker, batch, [list(range(len(LENGTHS)))])
    worker._forward = options
    assert_same_gradient(padded, packed)


def test_what_lies_on_padding_does_not_change_the_gradient(worker: PolicyWorker) -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    expected = gradient(worker, batch, [list(range(len(LENGTHS)))])
    padding = ~positions_mask(batch.tokens.response_lengths, 7)
    batch.tokens.responses = torch.where(padding, 3, batch.tokens.responses)
    for name in ("old_log_probs", "advantages", "rollout_is_weights"):
        setattr(batch, name, getattr(batch, name).masked_fill(padding, float("nan")))
    assert_same_gradient(gradient(worker, batch, [list(range(len(LENGTHS)))]), expected)


def test_a_planted_fault_is_seen(worker: PolicyWorker) -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    whole = gradient(worker, batch, [list(range(len(LENGTHS)))])
    with pytest.raises(AssertionError):
        assert_same_gradient(gradient(worker, batch, [[0, 2, 3], [4, 5]]), whole)


def test_update_moves_parameters_and_reports_exact_totals(worker: PolicyWorker) -> None:
    batch = make_train_batch(LENGTHS)
    before = torch.cat([p.full_tensor().flatten() for p in worker.model.module.parameters()]).clone()  # type: ignore[attr-defined]
    tokens, kept = int(batch.response_mask.sum()), int(batch.loss_mask.sum())
    share = MiniBatch([[0, 1], [2, 3, 4, 5]], tokens, 5, kept)
    records = worker.update(
        ragged(batch), [share], UpdateRequest(corrector_of(worker._correction), 0)
    ).metrics
    after = torch.cat([p.full_tensor().flatten() for p in worker.model.module.parameters()])  # type: ignore[attr-defined]
    assert not torch.equal(before, after)
    clipped = {record.name: record for record in records}["actor/pg_clipfrac"]
    assert clipped.value.count == kept
    assert 0 < clipped.value.value < 1


def test_full_diagnostics_get_entropies_and_sums_of_squared_probabilities(worker: PolicyWorker) -> None:
    batch = make_train_batch(LENGTHS)
    log_probs, entropies, squares, varentropies = scored(
        worker.compute_log_probs, batch.tokens, [[0, 1], [2, 3, 4, 5]]
    )
    some = batch.response_mask
    assert bool((log_probs[some].exp().square() < squares[some]).all())
    assert bool((-squares[some].log() < entropies[some]).all())  # Renyi's entropies fall with their order
    assert bool((varentropies[some] > 0).all())


def test_a_wholly_rejected_mini_batch_skips_the_step(worker: PolicyWorker) -> None:
    batch = make_train_batch(LENGTHS, rejected_rows=tuple(range(len(LENGTHS))))
    before = torch.cat([p.full_tensor().flatten() for p in worker.model.module.parameters()]).clone()  # type: ignore[attr-defined]
    request = UpdateRequest(corrector_of(worker._correction), 0)
    report = worker.update(ragged(batch), [MiniBatch([[0, 1]], 9, 2, num_loss_tokens=0)], request)
    records = {record.name: record.value for record in report.metrics}
    after = torch.cat([p.full_tensor().flatten() for p in worker.model.module.parameters()])  # type: ignore[attr-defined]
    assert torch.equal(before, after)
    assert report.loss_tokens == [0]
    assert records["rollout_corr/skipped_updates"] == 1


def test_an_update_reads_the_device_where_that_is_announced_and_nowhere_else(worker: PolicyWorker) -> None:
    """Each optimizer step reads its gradient's norm, the update its metrics, each forward the sizes that it
    packs rows by."""
    batch = make_train_batch(LENGTHS, REJECTED)
    kept = batch.response_mask.sum(-1)
    share = MiniBatch(
        [[0, 1, 2], [3, 4, 5]], int(kept.sum()), int((kept > 0).sum()), int(batch.loss_mask.sum())
    )
    request = UpdateRequest(corrector_of(worker._correction), policy_version=0)
    with HostReads() as reads:
        worker.update(ragged(batch), [share, share], request)
    # Micro-batches are cut from the rank's rows on the host, before they reach the device.
    places = [place for place in reads.places if not place.startswith("records/ragged.py")]
    assert Counter(places) == {
        "runtime/workers/sharded_model.py:step": 2,
        "runtime/workers/micro_batches.py:metrics": 1,
        "runtime/workers/packed_layout.py:from_lengths": 2 * 4,
        "runtime/workers/packing.py:sharing_prefixes": 2 * 4,
    }


def test_the_machine_has_memory_and_uses_some(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = host_memory()
    assert 1 << 28 < memory["MemAvailable"] < memory["MemTotal"] < 1 << 50
    used = {
        "MemTotal": 24 << 30,
        "MemAvailable": 21 << 30,
        "MemFree": 1 << 30,
    }  # other processes would move the real numbers
    monkeypatch.setattr("verl_rc.runtime.workers.policy_worker.host_memory", lambda: used)
    assert reduce_metrics(memory_metrics(torch.device("cpu"))) == {"perf/cpu_memory_used_gb": 3.0}


def test_a_device_reports_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: 3 << 30)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda _: 9 << 29)
    of_two_ranks = [*memory_metrics(torch.device("cuda", 0)), *memory_metrics(torch.device("cuda", 1))]
    metrics = reduce_metrics(of_two_ranks)
    assert metrics["perf/max_memory_allocated_gb"] == 3.0
    assert metrics["perf/max_memory_reserved_gb"] == 4.5


def test_losses_are_means_over_optimizer_steps_and_what_was_left_out_changed_no_weights() -> None:
    """Two mini-batches of four were skipped; the gradient of one of the others is not finite."""
    totals = ObjectiveTotals("actor")
    for loss, norm in ((0.5, 1.0), (1.5, math.nan)):
        totals.add(Objective(torch.tensor(loss), {"actor/loss": torch.tensor(loss)}, {}))
        totals.steps.append(OptimizerStep(norm))
    assert reduce_metrics(totals.metrics(is_first_rank=True))["actor/loss"] == 1.0
    assert totals.num_updates == 1
