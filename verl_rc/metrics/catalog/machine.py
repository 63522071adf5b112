"""Time and memory: seconds per stage, milliseconds per token, throughput, and what each weight sync sent."""

from verl_rc.metrics.catalog.spec import MetricSpec

_STAGES = {
    "gen": "sample responses",
    "admit": "draw prompts and hand them to the engines (asynchronous training)",
    "reward": "score responses",
    "old_log_prob": "compute log-probs of the proximal policy",
    "ref": "compute log-probs of the reference policy",
    "teacher": "compute log-probs of the teacher",
    "values": "compute the critic's values",
    "adv": "compute rollout correction and advantages, and check the batch, on the driver",
    "correction_statistics": "run the extra pass without gradient that some corrections need before the loss",
    "update_critic": "update the critic",
    "update_actor": "update the actor",
    "update_weights": "send the new weights to the engines and check that they arrived",
    "sync_canary": "generate and check canary tokens",
    "testing": "validate",
    "save_checkpoint": "write a checkpoint: the part that the loop waits for",
    "dump_rollout_generations": "write rollouts to disk",
    "token_records": "write token records to disk",
}
_BUSY = ("gen", "old_log_prob", "ref", "teacher", "values", "update_critic", "update_actor")
"""Stages in which workers compute."""
_PER_TOKEN = ("gen", "ref", "teacher", "values", "adv", "update_critic", "update_actor")

TIME = (
    MetricSpec("timing_s/step", "s", "wall-clock seconds of the step"),
    *(
        MetricSpec(f"timing_s/{stage}", "s", f"wall-clock seconds to {action}")
        for stage, action in _STAGES.items()
    ),
    *(
        MetricSpec(
            f"timing_busy_s/{stage}",
            "s",
            f"seconds in which the slowest worker computed, within timing_s/{stage}",
        )
        for stage in _BUSY
    ),
    *(
        MetricSpec(
            f"timing_per_token_ms/{stage}",
            "ms",
            f"1000 · timing_s/{stage} / {'response tokens' if stage == 'gen' else 'perf/total_num_tokens'}",
        )
        for stage in _PER_TOKEN
    ),
    MetricSpec("perf/total_num_tokens", "tokens", "prompt tokens + response tokens of the batch"),
    MetricSpec("perf/time_per_step", "s", "timing_s/step"),
    MetricSpec(
        "perf/throughput",
        "tokens/s",
        "perf/total_num_tokens / (timing_s/step · devices of all pools)",
    ),
    MetricSpec("perf/useful_tokens_per_second", "tokens/s", "ledger/trained_tokens / timing_s/step"),
    MetricSpec(
        "perf/rollout_tokens_per_second",
        "tokens/s",
        "tokens that the engines sampled / seconds from the beginning of the step to the last of them; not "
        "in asynchronous training",
    ),
    MetricSpec(
        "perf/cpu_memory_used_gb",
        "GiB",
        "maximum over the actor's ranks of (MemTotal − MemAvailable) of the host, after the update",
    ),
    MetricSpec(
        "perf/max_memory_allocated_gb",
        "GiB",
        "maximum over the actor's ranks of the GPU memory in tensors, at its peak since the process began",
    ),
    MetricSpec(
        "perf/max_memory_reserved_gb",
        "GiB",
        "maximum over the actor's ranks of the GPU memory that PyTorch's allocator held, at its peak since "
        "the process began",
    ),
    MetricSpec(
        "perf/overhead_fraction",
        "1",
        "max(0, 1 − (Σ timing_busy_s/* + timing_s/reward + timing_s/testing + timing_s/save_checkpoint) / "
        "timing_s/step)",
        (None, 0.1),
    ),
)
"""Entries of this section."""


SYNC = (
    MetricSpec(
        "sync/bytes",
        "bytes",
        "Σ size of the tensors sent, also to replaced engines. With model.lora.merge=False, all weights once "
        "and then the adapters",
    ),
    MetricSpec(
        "sync/update_survival",
        "1",
        "⟨R(W + D) − R(W), D⟩ / |D|², W = weights that training changes, D = their change in the step, R = "
        "rounding in the engines; 1: nothing is lost. Every sync_proof.survival_freq-th step",
    ),
    MetricSpec(
        "sync/changed_weights",
        "1",
        "changed weights whose rounded value in the engines changed / changed weights. Every "
        "sync_proof.survival_freq-th step",
    ),
    MetricSpec(
        "sync/canary_mean_gap",
        "nats",
        "maximum over engines of the mean over generated canary tokens of |trainer − rollout log-prob|",
    ),
    MetricSpec(
        "sync/canary_own_experts_gap",
        "nats",
        "mean over generated canary tokens of all engines of |trainer − rollout log-prob|, if the trainer's "
        "own router chooses the experts; with router replay only",
    ),
    MetricSpec(
        "sync/canary_max_gap",
        "nats",
        "maximum over generated canary tokens of all engines of |trainer − rollout log-prob|",
    ),
    MetricSpec(
        "sync/canary_nonfinite_tokens",
        "tokens",
        "generated canary tokens with a log-prob that is NaN or infinite; the gaps leave them out",
        (0, 0),
    ),
    MetricSpec(
        "sync/rollout_gap_mean",
        "nats",
        "mean over response tokens of |proximal − rollout log-prob|, before the update",
    ),
    MetricSpec(
        "sync/rollout_gap_max",
        "nats",
        "maximum over response tokens of |proximal − rollout log-prob|, before the update",
    ),
    MetricSpec(
        "recovery/engines_replaced",
        "1",
        "engines that died or hung, and were replaced, since the last step that was logged",
        (0, 0),
    ),
    MetricSpec(
        "recovery/requests_reissued",
        "1",
        "requests that these engines had not answered; the new engines answered them",
        (0, 0),
    ),
    MetricSpec(
        "sync/gap_limit", "nats", "gap limit of sync/rollout_gap_mean; above it trainer.alerts.gap acts"
    ),
)
"""Entries of this section."""
