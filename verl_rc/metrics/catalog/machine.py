"""Time and memory: seconds per stage, milliseconds per token, throughput, and what each weight sync sent."""

from verl_rc.metrics.bounds import BOUNDS
from verl_rc.metrics.catalog.spec import MetricSpec
from verl_rc.metrics.splits import STAGES

TIME = (
    MetricSpec("timing_s/step", "s", "wall-clock seconds of the step"),
    MetricSpec(
        "timing_s/{stage}",
        "s",
        "wall-clock seconds of a stage. "
        + "; ".join(f"{stage}: {action}" for stage, action in STAGES.items()),
    ),
    MetricSpec(
        "timing_busy_s/{stage}",
        "s",
        "seconds in which the slowest worker computed, within timing_s/{stage}",
    ),
    MetricSpec(
        "timing_per_token_ms/{stage}",
        "ms",
        "1000 · timing_s/{stage} / perf/total_num_tokens; of gen, / response tokens",
    ),
    MetricSpec("perf/total_num_tokens", "tokens", "prompt tokens + response tokens of the batch"),
    MetricSpec("perf/time_per_step", "s", "timing_s/step"),
    MetricSpec(
        "perf/throughput",
        "tokens/s",
        "perf/total_num_tokens / (timing_s/step · devices of all pools)",
    ),
    MetricSpec(
        "perf/mfu/{model}",
        "1",
        "(1 − perf/shared_tokens_fraction) · FLOPs of the model for the batch's tokens, rejected or not / "
        "(seconds of the stage · ranks · FLOPs per second of a device). actor and critic: forward and "
        "backward passes, update_*; actor_infer: old_log_prob. Device: the data sheet's 16-bit peak of known "
        "GPUs, else the fastest of five products of 1,024 × 1,024 matrices at the start",
    ),
    MetricSpec("perf/useful_tokens_per_second", "tokens/s", "ledger/trained_tokens / timing_s/step"),
    MetricSpec(
        "perf/rollout_tokens_per_second",
        "tokens/s",
        "tokens sampled / seconds from the beginning of the step to the last of them; synchronous training",
    ),
    MetricSpec(
        "perf/shared_tokens_fraction",
        "1",
        "tokens of the actor's passes that were not computed, as another row begins with them / all",
    ),
    MetricSpec(
        "perf/cpu_memory_used_gb",
        "GiB",
        "maximum over the actor's ranks of (MemTotal − MemAvailable) of the host, after the update",
    ),
    MetricSpec(
        "perf/max_memory_{kind}_gb",
        "GiB",
        "maximum over the actor's ranks of the peak of GPU memory in tensors (allocated) or held by "
        "PyTorch's allocator (reserved)",
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
        "Σ size of the tensors sent, also to replaced engines",
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
        "changed weights whose rounded value changed in the engines / changed weights, with update_survival",
    ),
    MetricSpec(
        "sync/canary_mean_gap",
        "nats",
        "maximum over engines of the mean over generated canary tokens of |trainer − rollout log-prob|",
    ),
    MetricSpec(
        "sync/canary_rounding",
        "nats",
        "mean over generated canary tokens of how far rounding in the less precise one of engine and trainer "
        "moves a log-prob, by the trainer; at the start. A first gap of more than "
        f"{BOUNDS.far_above_floor:g} times it is an alert",
    ),
    MetricSpec(
        "sync/canary_own_experts_gap",
        "nats",
        "mean over generated canary tokens of |trainer − rollout log-prob| with the experts of the trainer's "
        "own router; with router replay",
    ),
    MetricSpec(
        "sync/canary_nonfinite_tokens",
        "tokens",
        "generated canary tokens with a log-prob that is NaN or infinite; the gaps leave them out",
        (0, 0),
    ),
    MetricSpec(
        "sync/rollout_gap_{statistic}",
        "nats",
        "|proximal − rollout log-prob| before the update, over response tokens",
    ),
    MetricSpec(
        "recovery/engines_replaced",
        "1",
        "engines replaced since the last logged step",
        (0, 0),
    ),
    MetricSpec(
        "recovery/requests_reissued",
        "1",
        "requests that these engines had not answered",
        (0, 0),
    ),
    MetricSpec(
        "sync/gap_limit", "nats", "limit of sync/rollout_gap_mean above which trainer.alerts.gap acts"
    ),
)
"""Entries of this section."""
