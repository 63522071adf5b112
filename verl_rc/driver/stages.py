"""The words of the loop, one short function each."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verl_rc.cluster.remote import wait_for_all
from verl_rc.correction import CorrectionResult, require_finite
from verl_rc.data.batches import Completions, PolicyEvaluations, RolloutBatch, TrainBatch
from verl_rc.data.dataset import PromptRow
from verl_rc.data.microbatch import MicroBatchLimit
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord
from verl_rc.ppo.batch_metrics import batch_metrics, policy_gap_metrics
from verl_rc.ppo.mini_batches import MiniBatchOptions, plan_mini_batches
from verl_rc.rollout.collect import build_rollout_batch, check_versions
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions, request_seed
from verl_rc.weight_sync.proof import LogProbGap, check_receipts


@dataclass(frozen=True)
class ScoredTexts:
    """Decoded responses and what the reward function says about them; row for row with the rollouts."""

    texts: list[str]
    scores: Tensor
    """float32 ``[B]``."""
    extras: dict[str, list[object]]
    """Further columns returned by the reward function, e.g. ``acc``."""

    def accuracies(self) -> list[float]:
        """``acc`` of every sample; its score where the reward function gives no ``acc``."""
        given = self.extras.get("acc", [None] * len(self.texts))
        pairs = zip(given, self.scores.tolist(), strict=True)
        return [score if accuracy is None else float(str(accuracy)) for accuracy, score in pairs]

    @classmethod
    def concatenated(cls, parts: "list[ScoredTexts]") -> "ScoredTexts":
        """Several parts as one, in order; an extra that a part lacks is None there."""
        names = sorted({name for part in parts for name in part.extras})
        extras = {
            name: [value for part in parts for value in part.extras.get(name, [None] * len(part.texts))] for name in names
        }
        return cls([text for part in parts for text in part.texts], torch.cat([part.scores for part in parts]), extras)


def generate(run: Run, prompts: list[PromptRow], step: int, epoch: int, record: StepRecord) -> RolloutBatch:
    """Sample ``rollout.n`` responses per prompt; rows of one prompt are adjacent."""
    rollout = run.config.actor_rollout_ref.rollout
    identity = {"seed": run.config.trainer.seed, "step": step, "epoch": epoch}
    requests = [
        GenerationRequest(row.prompt_token_ids, request_seed({**identity, "row": row.row_index, "sample": sample}))
        for row in prompts
        for sample in range(rollout.n)
    ]
    groups = [index for index in range(len(prompts)) for _ in range(rollout.n)]
    with record.stage("gen"):
        completions = run.engines.generate(requests, SamplingOptions.for_training(rollout, run.stop_token_ids))
        rollouts = as_rollouts(run, requests, completions, groups)
        check_versions(rollouts, expected_version=step - 1)
    record.add_busy("gen", run.engines.busy_seconds)
    record.add({"perf/rollout_tokens_per_second": float(rollouts.tokens.response_lengths.sum()) / run.engines.busy_seconds})
    return rollouts


def as_rollouts(
    run: Run, requests: list[GenerationRequest], completions: Completions, group_ids: list[int]
) -> RolloutBatch:
    """Requests and their completions as one batch."""
    prompts = [request.prompt_token_ids for request in requests]
    return build_rollout_batch(prompts, group_ids, completions, pad_token_id=run.tokenizer.pad_token_id)


def score(run: Run, prompts: list[PromptRow], rollouts: RolloutBatch, record: StepRecord) -> ScoredTexts:
    """Decode every response and ask the reward function for its score."""
    with record.stage("reward"):
        texts = decode(run, rollouts)
        outputs = [run.reward(prompts[group], text) for group, text in zip(rollouts.group_ids.tolist(), texts, strict=True)]
    names = sorted({name for output in outputs for name in output.extras})
    extras = {name: [output.extras.get(name) for output in outputs] for name in names}
    return ScoredTexts(texts, torch.tensor([output.score for output in outputs], dtype=torch.float32), extras)


def decode(run: Run, rollouts: RolloutBatch) -> list[str]:
    """Response texts without special tokens."""
    lengths = rollouts.tokens.response_lengths.tolist()
    rows = [row[:length] for row, length in zip(rollouts.tokens.responses.tolist(), lengths, strict=True)]
    texts: list[str] = run.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return texts


def evaluate_policies(run: Run, rollouts: RolloutBatch, record: StepRecord) -> PolicyEvaluations:
    """Log-probs of the proximal policy; refuses the step when they show that the engine holds other weights."""
    with record.stage("old_log_prob"):
        scores = run.trainer.compute_log_probs(rollouts.tokens, log_prob_limit(run))
    record.add_busy("old_log_prob", run.trainer.busy_seconds)
    gap = LogProbGap.between(scores.log_probs, rollouts.rollout_log_probs, rollouts.response_mask)
    run.gap_monitor.check(gap, "this step's rollouts")
    record.add({"sync/rollout_gap_mean": gap.mean, "sync/rollout_gap_max": gap.maximum})
    assert scores.entropys is not None
    return PolicyEvaluations(
        old_log_probs=scores.log_probs, entropys=scores.entropys, batch_size=rollouts.batch_size
    )


def log_prob_limit(run: Run) -> MicroBatchLimit:
    """How much one forward without gradient may hold."""
    rollout = run.config.actor_rollout_ref.rollout
    if rollout.log_prob_use_dynamic_bsz:
        return MicroBatchLimit(max_tokens=rollout.log_prob_max_token_len_per_gpu)
    return MicroBatchLimit(max_rows=rollout.log_prob_micro_batch_size_per_gpu)


def update_limit(run: Run) -> MicroBatchLimit:
    """How much one forward and backward may hold."""
    actor = run.config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz:
        return MicroBatchLimit(max_tokens=actor.ppo_max_token_len_per_gpu)
    return MicroBatchLimit(max_rows=actor.ppo_micro_batch_size_per_gpu)


def update_policy(run: Run, batch: TrainBatch, step: int, record: StepRecord) -> None:
    """One optimizer step per mini-batch and epoch."""
    actor, correction = run.config.actor_rollout_ref.actor, run.config.algorithm.rollout_correction
    options = MiniBatchOptions(
        rows_per_mini_batch=actor.ppo_mini_batch_size * run.config.actor_rollout_ref.rollout.n,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=request_seed({"seed": run.config.trainer.seed, "step": step}),
        denominator=correction.rejection_denominator,
    )
    mini_batches = plan_mini_batches(batch, options)
    run.skipped_updates.observe(mini_batches)
    with record.stage("update_actor"):
        record.add_records(run.trainer.update(batch, mini_batches, update_limit(run)))
    record.add_busy("update_actor", run.trainer.busy_seconds)


def publish_weights(run: Run, version: int, record: StepRecord) -> None:
    """Send the current weights to every engine as ``version`` and prove that they arrived."""
    proof = run.config.actor_rollout_ref.rollout.sync_proof
    bucket_bytes = run.config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    with record.stage("update_weights"):
        receiving = run.engines.receive_weights(run.manifest, bucket_bytes, version)
        sending = run.trainer.send_weights()
        answers = wait_for_all(sending + receiving)
        check_receipts(run.manifest, answers[0], answers[len(sending) :], version)
    record.add({"sync/bytes": float(run.manifest.num_bytes), "sync/tensors": float(len(run.manifest.tensors))})
    if version == 0 or (proof.canary_freq > 0 and version % proof.canary_freq == 0):
        with record.stage("sync_canary"):
            check_canary(run, version, record)


def check_canary(run: Run, version: int, record: StepRecord) -> None:
    """Compare log-probs of freshly generated tokens behind a cached prefix, engine by engine, with the trainer's.

    The prompts are longer than a block of the engine's cache, so an engine that kept blocks of older weights is
    found out; log-probs of *prompt* tokens would bypass that cache and prove nothing about it.
    """
    rollout = run.config.actor_rollout_ref.rollout
    requests = canary_requests(run)
    options = SamplingOptions.for_training(rollout, run.stop_token_ids).replaced(
        max_tokens=rollout.sync_proof.canary_max_tokens, ignore_eos=True
    )
    largest = 0.0
    for engine, completions in enumerate(run.engines.generate_on_each(requests, options)):
        rollouts = as_rollouts(run, requests, completions, list(range(len(requests))))
        check_versions(rollouts, expected_version=version)
        scores = run.trainer.compute_log_probs(rollouts.tokens, log_prob_limit(run))
        gap = LogProbGap.between(scores.log_probs, rollouts.rollout_log_probs, rollouts.response_mask)
        run.canary_monitor.check(gap, f"canary tokens of rollout engine {engine} at weight version {version}")
        largest = max(largest, gap.maximum)
    record.add({"sync/canary_max_gap": largest})


def canary_requests(run: Run) -> list[GenerationRequest]:
    """Fixed prompts that share one prefix longer than a cache block, as far as the engine's length limit allows."""
    proof = run.config.actor_rollout_ref.rollout.sync_proof
    room = run.max_model_len - min(proof.canary_max_tokens, run.config.data.max_response_length)
    length = max(1, min(run.block_size + 8, room))
    tokens = [token for row in run.validation_rows for token in row.prompt_token_ids]
    prefix = (tokens * (length // len(tokens) + 1))[: length - 1]
    last = sorted(set(tokens))
    return [
        GenerationRequest([*prefix, last[index % len(last)]], seed=index) for index in range(proof.canary_num_prompts)
    ]


def describe_batch(
    run: Run,
    batch: TrainBatch,
    scored: ScoredTexts,
    rollouts: RolloutBatch,
    evaluations: PolicyEvaluations,
    correction: CorrectionResult,
    record: StepRecord,
) -> None:
    """Everything there is to know about the batch before the update."""
    data = run.config.data
    record.add(batch_metrics(batch, scored.scores, rollouts, data.max_response_length, data.max_prompt_length))
    record.add(policy_gap_metrics(rollouts, evaluations))
    correction_metrics = correction.metrics()
    require_finite(correction_metrics, run.config.algorithm.rollout_correction)
    record.add(correction_metrics)


def dump_rollouts(
    run: Run, step: int, prompts: list[PromptRow], rollouts: RolloutBatch, scored: ScoredTexts, record: StepRecord
) -> None:
    """Write the step's samples as JSON lines to ``trainer.rollout_data_dir``, when that is set."""
    if run.config.trainer.rollout_data_dir is None:
        return
    with record.stage("dump_rollout_generations"):
        write_samples(run.config.trainer.rollout_data_dir, step, [prompts[g] for g in rollouts.group_ids.tolist()], scored)


def write_samples(folder: str, step: int, rows: list[PromptRow], scored: ScoredTexts) -> None:
    """``<folder>/<step>.jsonl``: input, output, ground truth, score and the reward's extras of every sample."""
    path = Path(folder) / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for index, (row, text, value) in enumerate(zip(rows, scored.texts, scored.scores.tolist(), strict=True)):
            extras = {name: column[index] for name, column in scored.extras.items()}
            sample = {"input": row.messages, "output": text, "gts": row.ground_truth, "score": value, "step": step, **extras}
            file.write(json.dumps(sample, ensure_ascii=False, default=str) + "\n")
