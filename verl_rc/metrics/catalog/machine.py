"""Time and memory: seconds per stage, milliseconds per token, throughput, and what each weight sync sent."""

from verl_rc.metrics.catalog.spec import MetricSpec

_STAGES = {
    "gen": "sampling the responses",
    "admit": "drawing prompts and handing them to the engines (asynchronous training)",
    "reward": "scoring the responses",
    "old_log_prob": "log-probs under the proximal policy",
    "ref": "log-probs under the reference policy",
    "teacher": "log-probs under the teacher",
    "values": "the critic's values",
    "adv": "rollout correction, advantages and guards on the driver",
    "correction_statistics": "the extra no-gradient pass that some corrections need before the loss",
    "update_critic": "the critic's update",
    "update_actor": "the actor's update",
    "update_weights": "sending the new weights to the engines, with proof of arrival",
    "sync_canary": "generating and checking canary tokens",
    "testing": "validation",
    "save_checkpoint": "writing a checkpoint (the part the loop waits for)",
    "dump_rollout_generations": "writing rollouts to disk",
    "token_records": "writing what was computed for the tokens of some rows",
}
_BUSY = ("gen", "old_log_prob", "ref", "teacher", "values", "update_critic", "update_actor")
"""Stages in which workers compute."""
_PER_TOKEN = {
    "gen": "response tokens",
    "ref": "all tokens",
    "teacher": "all tokens",
    "values": "all tokens",
    "adv": "all tokens",
    "update_critic": "all tokens",
    "update_actor": "all tokens",
}

TIME = (
    MetricSpec("timing_s/step", "s", "wall-clock seconds of the whole step"),
    *(MetricSpec(f"timing_s/{stage}", "s", f"{what}: wall clock") for stage, what in _STAGES.items()),
    *(
        MetricSpec(
            f"timing_busy_s/{stage}",
            "s",
            f"{_STAGES[stage]}: seconds the slowest worker itself computed",
        )
        for stage in _BUSY
    ),
    *(
        MetricSpec(f"timing_per_token_ms/{stage}", "ms", f"1000 · timing_s/{stage} / {tokens}")
        for stage, tokens in _PER_TOKEN.items()
    ),
    MetricSpec("perf/total_num_tokens", "tokens", "Σ prompt and response tokens of the step"),
    MetricSpec("perf/time_per_step", "s", "= timing_s/step"),
    MetricSpec(
        "perf/throughput",
        "tokens/s",
        "perf/total_num_tokens / (timing_s/step · devices of all pools)",
    ),
    MetricSpec(
        "perf/useful_tokens_per_second",
        "tokens/s",
        "ledger/trained_tokens / timing_s/step, all devices together",
    ),
    MetricSpec(
        "perf/rollout_tokens_per_second",
        "tokens/s",
        "tokens sampled / seconds from the beginning of a synchronous step to its last sample",
    ),
    MetricSpec(
        "perf/cpu_memory_used_gb",
        "GiB",
        "memory of the machine that new processes cannot have, after the actor's update; the largest over "
        "its ranks",
    ),
    MetricSpec(
        "perf/max_memory_allocated_gb",
        "GiB",
        "most memory of a GPU that a rank's tensors of all roles ever took, the largest over the ranks",
    ),
    MetricSpec(
        "perf/max_memory_reserved_gb",
        "GiB",
        "most memory of a GPU that a rank's allocator ever held, the largest over the ranks",
    ),
    MetricSpec(
        "perf/overhead_fraction",
        "1",
        "share of the step in which no worker computed: 1 − (Σ timing_busy_s + timing_s of reward, testing "
        "and save_checkpoint) / timing_s/step, at least 0",
        (None, 0.1),
    ),
)
"""Entries of this section."""


SYNC = (
    MetricSpec(
        "sync/bytes",
        "bytes",
        "Σ size of the tensors sent, a new engine's too; with model.lora.merge=False all of them once, "
        "then the adapters",
    ),
    MetricSpec("sync/tensors", "1", "number of tensors sent; equals the manifest's"),
    MetricSpec(
        "sync/update_survival",
        "1",
        "⟨Q(W + D) − Q(W), D⟩ / |D|² over all weights W that training changes: Q rounds as engines do, "
        "D is the update of the step; 1: nothing is lost; every sync_proof.survival_freq-th step",
    ),
    MetricSpec(
        "sync/changed_weights",
        "1",
        "weights that are another number in the engines after the update / weights that changed; every "
        "sync_proof.survival_freq-th step",
    ),
    MetricSpec(
        "sync/canary_mean_gap",
        "nats",
        "mean over generated canary tokens of |trainer − rollout log-prob|, of the engine where it is "
        "largest",
    ),
    MetricSpec(
        "sync/canary_own_experts_gap",
        "nats",
        "with router replay: mean over all generated canary tokens of |trainer − rollout log-prob| where "
        "the trainer takes its own experts",
    ),
    MetricSpec(
        "sync/canary_max_gap", "nats", "largest |trainer − rollout log-prob| over generated canary tokens"
    ),
    MetricSpec(
        "sync/canary_nonfinite_tokens",
        "tokens",
        "generated canary tokens with a log-prob that is NaN or infinite; no gap counts them",
        (0, 0),
    ),
    MetricSpec(
        "sync/rollout_gap_mean",
        "nats",
        "mean over response tokens of |proximal − rollout log-prob|, before the update",
    ),
    MetricSpec("sync/rollout_gap_max", "nats", "largest of the same"),
    MetricSpec(
        "recovery/engines_replaced",
        "1",
        "engines that died or hung since the last step logged; replaced",
        (0, 0),
    ),
    MetricSpec(
        "recovery/requests_reissued",
        "1",
        "requests that such an engine owed; its successor answered them",
        (0, 0),
    ),
    MetricSpec("sync/gap_limit", "nats", "usual mean gap; above it trainer.alerts.gap acts"),
)
"""Entries of this section."""
