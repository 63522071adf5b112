"""Charts that answer questions: the sections of a W&B workspace, in docs/running.md and in the view that can
be saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One chart."""

    title: str
    metrics: Sequence[str]
    """Names of the catalogue, with its words in braces."""


PANELS: Mapping[str, Sequence[Panel]] = {
    "Overview": (
        Panel("cause named by signatures", ("alerts/cause",)),
        Panel("validation", ("val-core/{data_source}/acc/mean@{n}",)),
        Panel("reward", ("critic/score/mean",)),
        Panel("effective sample size", ("rollout_corr/rollout_is_eff_sample_size",)),
        Panel(
            "logit noise, and its floor in the first steps",
            ("rollout_corr/logit_noise", "rollout_corr/logit_noise_floor"),
        ),
        Panel("missing mass / its standard error", ("rollout_corr/missing_mass_z",)),
        Panel("rejected tokens / response tokens", ("rollout_corr/rollout_rs_masked_fraction",)),
        Panel("seconds per step", ("timing_s/step",)),
    ),
    "Learning": (
        Panel("validation", ("val-core/{data_source}/acc/mean@{n}",)),
        Panel("reward", ("critic/score/mean", "critic/score/min", "critic/score/max")),
        Panel("response length", ("response_length/mean", "response_length/clip_ratio")),
        Panel("entropy", ("actor/entropy", "actor/update_entropy")),
    ),
    "Update": (
        Panel("gradient", ("actor/grad_norm", "actor/nonfinite_gradients")),
        Panel("clipping", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")),
        Panel("KL of the update", ("actor/ppo_kl", "actor/kl_loss")),
        Panel("loss and rate", ("actor/pg_loss", "actor/lr")),
        Panel("critic", ("critic/vf_explained_var", "critic/vf_loss", "critic/vf_clipfrac")),
    ),
    "Gap": (
        Panel("KL(rollout || train) per token", ("rollout_corr/kl", "rollout_corr/k3_kl")),
        Panel("chi² of tokens and of sequences", ("rollout_corr/chi2_token", "rollout_corr/chi2_seq")),
        Panel(
            "difference of probabilities",
            ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
        ),
        Panel(
            "gap before the update, and the gap limit",
            ("sync/rollout_gap_mean", "sync/gap_limit"),
        ),
        Panel(
            "log-ratios (full)",
            ("rollout_corr/log_ratio", "rollout_corr/log_ratio_p1", "rollout_corr/log_ratio_p99"),
        ),
    ),
    "Weights": (
        Panel("effective sample size", ("rollout_corr/rollout_is_eff_sample_size",)),
        Panel(
            "weights",
            ("rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_std", "rollout_corr/rollout_is_max"),
        ),
        Panel(
            "weights beyond the thresholds / weights",
            ("rollout_corr/rollout_is_ratio_fraction_high", "rollout_corr/rollout_is_ratio_fraction_low"),
        ),
        Panel("99th percentile of raw weights (full)", ("rollout_corr/rollout_is_p99",)),
    ),
    "Rejection": (
        Panel(
            "rejected tokens and sequences / all",
            (
                "rollout_corr/rollout_rs_masked_fraction",
                "rollout_corr/rollout_rs_seq_masked_fraction",
                "rollout_corr/rollout_rs_seq_rejected_fraction",
            ),
        ),
        Panel("rejected tokens / tokens, by rule", ("rollout_corr/rollout_rs_{rule}_masked_fraction",)),
        Panel(
            "kept tokens and scores, by correctness (full)",
            (
                "rollout_corr/kept_fraction_correct",
                "rollout_corr/kept_fraction_wrong",
                "rollout_corr/kept_score_mean",
                "rollout_corr/rejected_score_mean",
            ),
        ),
    ),
    "Faults": (
        Panel(
            "must stay at 0",
            (
                "rollout_corr/nonfinite_token_fraction",
                "rollout_corr/skipped_updates",
                "rollout_corr/safety_clamped_fraction",
                "actor/ppo_kl_clamped_fraction",
            ),
        ),
        Panel(
            "test for sampling filters and shifted tokens (full)",
            ("rollout_corr/misalignment_z",),
        ),
    ),
    "Causes (full)": (
        Panel(
            "logit noise, and its floor in the first steps",
            ("rollout_corr/logit_noise", "rollout_corr/logit_noise_floor"),
        ),
        Panel("temperature", ("rollout_corr/temperature_slope", "rollout_corr/temperature_r2")),
        Panel(
            "surprisal excess and missing mass",
            (
                "rollout_corr/surprisal_excess",
                "rollout_corr/surprisal_excess_bound",
                "rollout_corr/missing_mass_z",
            ),
        ),
        Panel("cause named by signatures", ("alerts/cause",)),
    ),
    "Speed": (
        Panel(
            "seconds per step",
            (
                "timing_s/step",
                "timing_s/gen",
                "timing_s/old_log_prob",
                "timing_s/update_actor",
                "timing_s/update_weights",
            ),
        ),
        Panel("throughput", ("perf/throughput", "perf/mfu/actor", "perf/overhead_fraction")),
    ),
}
"""Charts by section, in order. The overview comes first, behind the verdict that every run has as a column.
"""
