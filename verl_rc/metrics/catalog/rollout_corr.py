"""Rollout correction: how far trainer and rollout policy disagree, and what the weights and rules did about
it."""

import math

from verl_rc.metrics.bounds import BOUNDS
from verl_rc.metrics.catalog.spec import Bounds, MetricSpec
from verl_rc.metrics.splits import ANSWERS, LENGTHS, SIGNS, TURN_COUNTS

SYMBOLS = {
    "l": "log-ratio of a token: its train − its rollout log-prob, nats",
    "ρ": "exp(l), the ratio of a token",
    "Σ, Π": "over the tokens of a row in what is said of rows, else over all tokens",
    "mean": "over response tokens, or over rows (sequences) that have some, before rejection",
    "w": "importance weight: *raw* before the threshold; *applied* after it, and before "
    "rollout_is_batch_normalize divides it by rollout_is_batch_norm_factor",
    "n": "how many tokens, rows or prompts an average or a test is over",
    "t": "place of a token in the response",
    "p": "probability of the token under the trainer; u = log p + H",
    "H": "entropy of the trainer's distribution at the token; V: the variance of u under it",
    "Q": "sum of its squared probabilities; g = 1 − 2p + Q",
    "T": "temperature of the trainer; T′: of the engine",
    "z": "how many standard errors, over rows where the entry does not say of what, a number is from 0",
}
"""What formulas of this section are written in; a meaning may define a second symbol from the first."""
_NEAR_0: Bounds = (-BOUNDS.z, BOUNDS.z)

_DISAGREEMENT: tuple[tuple[str, str, str, Bounds | None], ...] = (
    ("training_log_ppl", "nats", "mean over rows of −(row mean of the train log-prob)", None),
    ("rollout_log_ppl", "nats", "mean over rows of −(row mean of the rollout log-prob)", None),
    ("training_ppl", "1", "mean over rows of exp(−row mean of the train log-prob)", None),
    ("rollout_ppl", "1", "mean over rows of exp(−row mean of the rollout log-prob)", None),
    (
        "log_ppl_diff",
        "nats",
        "mean over rows of training − rollout log-perplexity = −(row mean of l)",
        (-0.1, 0.1),
    ),
    ("log_ppl_abs_diff", "nats", "mean over rows of its absolute value", (0, 0.1)),
    ("log_ppl_diff_max", "nats", "largest over rows", None),
    ("log_ppl_diff_min", "nats", "smallest over rows", None),
    ("ppl_ratio", "1", "mean over rows of exp(training − rollout log-perplexity)", (0.9, 1.1)),
    (
        "kl",
        "nats",
        "mean over tokens of −l: k1 of KL(rollout || train); may be negative in a sample",
        (-0.01, 0.1),
    ),
    ("k3_kl", "nats", "mean over tokens of ρ − l − 1: k3 of the same, never negative", (0, 0.1)),
    ("chi2_token", "1", "mean over tokens of ρ², less 1; may be negative in a sample", (-0.1, 1)),
    ("chi2_seq", "1", "mean over rows of (Π ρ)², less 1; dominated by single rows when large", None),
)
_WEIGHTS: tuple[tuple[str, str, Bounds | None], ...] = (
    ("mean", "mean over tokens of the applied weight", (0.5, 2)),
    ("std", "population standard deviation over tokens of the applied weight", (0, 1)),
    ("min", "smallest applied weight, of tokens or rows as the level is", None),
    ("max", "largest applied weight, of tokens or rows as the level is", None),
    (
        "eff_sample_size",
        "(Σw)² / (n Σw²) of the applied weights, over tokens or rows as the level is",
        (0.5, 1),
    ),
    (
        "ratio_fraction_high",
        "share of tokens or rows whose raw weight is above the upper threshold",
        (0, 0.1),
    ),
    (
        "ratio_fraction_low",
        "share of tokens or rows whose raw weight is below the lower threshold (1/upper if none)",
        (0, 0.1),
    ),
    ("seq_mean", "mean over rows of the row's mean applied weight", (0.5, 2)),
    ("seq_std", "standard deviation (n − 1) over rows of the same", None),
    ("seq_max", "largest row mean", None),
    ("seq_min", "smallest row mean", None),
    ("seq_max_deviation", "largest |row mean − 1|", (0, 1)),
    ("seq_fraction_high", "share of rows whose mean raw weight is above the upper threshold", (0, 0.1)),
    ("seq_fraction_low", "share of rows whose mean raw weight is below the lower threshold", (0, 0.1)),
    ("oob_ratio", "two-sided thresholds: share of tokens whose raw weight lies outside", (0, 0.1)),
    ("batch_norm_factor", "what the weights were divided by: their mean over tokens or rows", (0.5, 2)),
)
_RULE: tuple[tuple[str, str, Bounds | None], ...] = (
    ("mean", "mean over tokens of the rule's statistic (a row's value on each of its tokens)", None),
    ("std", "population standard deviation of the statistic clamped to its bounds", None),
    (
        "max",
        "largest statistic, over tokens or rows; k1 statistics are −log ratios: the largest is the lowest "
        "ratio",
        None,
    ),
    ("min", "smallest statistic, over tokens or rows", None),
    ("fraction_high", "share above the upper bound (k1: ratios above it)", None),
    ("fraction_low", "share below the lower bound (k1: ratios below it; others have none: 0)", None),
    ("seq_mean", "mean over rows of the row's mean statistic", None),
    ("seq_std", "standard deviation (n − 1) over rows", None),
    ("seq_max", "largest over rows", None),
    ("seq_min", "smallest over rows", None),
    ("seq_max_deviation", "largest |statistic| over rows", None),
    ("seq_fraction_high", "share of rows above the upper bound", None),
    ("seq_fraction_low", "share of rows below the lower bound (k1 only)", None),
    ("masked_fraction", "share of tokens this rule rejects", (0, 0.1)),
    ("seq_masked_fraction", "share of non-empty rows with a token this rule rejects", (0, 0.1)),
)
_OUTCOME: tuple[tuple[str, str, Bounds | None], ...] = (
    (
        "rollout_rs_masked_fraction",
        "share of response tokens that any cause rejects: a rule, the veto, opsm, a log-prob that is not "
        "finite",
        (0, 0.1),
    ),
    ("rollout_rs_seq_masked_fraction", "share of non-empty rows with a rejected token", (0, 0.1)),
    ("rollout_is_veto_fraction", "share of non-empty rows that the veto rejects", (0, 0.1)),
    ("rollout_is_catastrophic_token_fraction", "share of tokens below the veto's threshold", (0, 0.001)),
    ("nonfinite_token_fraction", "share of response tokens with a log-prob that is NaN or infinite", (0, 0)),
    (
        "safety_clamped_fraction",
        "share of tokens whose |l| was cut to the safety bound before exp",
        (0, 0.001),
    ),
    ("rollout_rs_seq_rejected_fraction", "share of non-empty rows that are fully rejected", (0, 0.1)),
    (
        "rollout_rs_adaptive_threshold",
        "upper bound of the ratio in force, whose reciprocal is the lower one; with "
        "rollout_rs_target_acceptance",
        None,
    ),
    ("skipped_updates", "optimizer steps skipped because nothing was left of the mini-batch", (0, 0)),
)

_LENGTHS = ", ".join(
    f"{name}: {fewest}{' and more' if math.isinf(most) else f' to {most}'}"
    for name, (fewest, most) in LENGTHS.items()
)
_FULL: tuple[tuple[str, str, str, Bounds | None], ...] = (
    (
        "log_ratio_p{percent}",
        "nats",
        "percentile over tokens of l, from a histogram (relative error at most 4 %)",
        None,
    ),
    ("log_ratio_seq_p{percent}", "nats", "percentile over rows of Σ l", None),
    ("log_ratio_geo_p{percent}", "nats", "percentile over rows of the row mean of l", None),
    ("log_ratio", "nats", "histogram over tokens of l", None),
    ("log_ratio_abs_max", "nats", "largest |l| over tokens", None),
    ("log_ratio_exact_fraction", "1", "share of tokens with l = 0 exactly", None),
    (
        "safety_clamped_seq_fraction",
        "1",
        "share of rows whose |Σ l| was cut to the safety bound before exp",
        (0, 0.001),
    ),
    (
        "misalignment_z",
        "1",
        "mean(ρ − 1) / (std(ρ) / √n) over tokens; 0 is expected however far two proper distributions lie "
        f"apart: lasting values beyond ±{BOUNDS.z:g} mean sampling filters that the trainer does not mirror, "
        "or log-probs of other tokens. 0 if all ρ are exactly 1; left out for fewer than two tokens, or "
        "where all ρ are the same but not 1. missing_mass_z tests the same, by rows and with the opposite "
        "sign",
        _NEAR_0,
    ),
    (
        "misalignment_z_seq",
        "1",
        "the same over rows, of Π ρ: the standard error of a sample of independent rows",
        _NEAR_0,
    ),
    (
        "rollout_is_raw_{statistic}",
        "1",
        "mean, std, min or max of the weights before threshold, over tokens or rows",
        None,
    ),
    (
        "rollout_is_p{percent}",
        "1",
        "percentile of the raw weights, from the histogram of the log-ratios",
        None,
    ),
    (
        "rollout_is_pareto_k",
        "1",
        "shape of the tail of the raw weights; above the healthy range averages over them are unreliable; "
        "left out where rounding of float32 alone makes the tail",
        (-1, 0.7),
    ),
    (
        "rollout_is_ess_raw_{level}",
        "1",
        "(Σw)² / (n Σw²) of the raw weights over tokens, rows or prompts (not where the actor corrects)",
        (0.3, 1),
    ),
    (
        "rollout_is_ess_applied_{level}",
        "1",
        "(Σw)² / (n Σw²) of the applied weights over tokens, rows or prompts (not where the actor "
        "corrects); at the level of rollout_is "
        "(token, or sequence where a row has one weight) equal to rollout_is_eff_sample_size",
        (0.5, 1),
    ),
    (
        "rollout_rs_{rule}_exclusive_fraction",
        "1",
        "share of response tokens that this rule alone rejects",
        None,
    ),
    ("rollout_rs_overlap_fraction", "1", "share of response tokens that several rules reject", None),
    (
        "kept_fraction_{split}",
        "1",
        f"share of tokens kept, by length of the response in tokens ({_LENGTHS}), sign of the token's "
        f"advantage ({' or '.join(SIGNS)}), or score above 0 or not ({' or '.join(ANSWERS)})",
        None,
    ),
    ("kept_score_mean", "reward", "mean score of the rows with at least one kept token", None),
    ("rejected_score_mean", "reward", "mean score of the fully rejected rows", None),
    (
        "token_age_mean",
        "steps",
        "mean over tokens of (step − 1) − version; with log-probs that are all finite equal to "
        "async/token_age/mean, which every asynchronous run has",
        (0, 4),
    ),
    ("token_age_max", "steps", "age of the oldest token", None),
    ("age_{age}_token_fraction", "1", "share of tokens of this age; the last age holds all older ones", None),
    ("age_{age}_kl", "nats", "mean of −l over the tokens of this age", None),
    ("age_{age}_k3_kl", "nats", "mean of ρ − l − 1 over the tokens of this age", None),
    ("age_{age}_rejected_fraction", "1", "share of the response tokens of this age that are rejected", None),
    ("age_{age}_rollout_is_mean", "1", "mean over the tokens of this age of the applied weight", None),
    ("age_{age}_rollout_is_max", "1", "largest applied weight of a token of this age", None),
    (
        "age_{age}_rollout_is_ess",
        "1",
        "(Σw)² / (n Σw²) of the applied weights over the tokens of this age",
        (0.5, 1),
    ),
    (
        "age_{age}_rollout_is_truncated_fraction",
        "1",
        "share of the tokens of this age whose weight the threshold changed",
        None,
    ),
    (
        "turn_{turn}_token_fraction",
        "1",
        "share of tokens of this turn of the policy; the last turn holds all later ones",
        None,
    ),
    ("turn_{turn}_kl", "nats", "mean of −l over the tokens of this turn", None),
    ("turn_{turn}_k3_kl", "nats", "mean of ρ − l − 1 over the tokens of this turn", None),
    (
        "ess_turns_{turns}",
        "1",
        f"(Σw)² / (n Σw²) over the rows with this many turns of the policy ({', '.join(TURN_COUNTS)}), w = "
        "exp(Σ l) of the whole row: what sequence weights would cost",
        None,
    ),
)

_AT_THE_HEAD = f"over the first {BOUNDS.head} positions"
_SIGNATURES: tuple[tuple[str, str, str, Bounds | None], ...] = (
    (
        "missing_mass",
        "1",
        "1 − mean over tokens of ρ: 0 is expected if the tokens come from what the engine reports",
        None,
    ),
    (
        "missing_mass_z",
        "1",
        f"missing_mass in standard errors over rows: above {BOUNDS.z:g} mass is missing, below "
        f"−{BOUNDS.z:g} there is too much; misalignment_z tests the same as if tokens were independent, and "
        "with the opposite sign",
        _NEAR_0,
    ),
    (
        "lag",
        "tokens",
        f"k of −{-min(BOUNDS.lags)} to {max(BOUNDS.lags)} for which the mean over tokens of |train log-prob "
        "at t − rollout log-prob at t + k| is smallest, if that halves the one at 0 and that is above "
        f"{BOUNDS.lag_distance:g}, else 0; {_AT_THE_HEAD}",
        (0, 0),
    ),
    (
        "rounded_fraction",
        "1",
        f"share of the rollout log-probs other than 0 whose last {BOUNDS.rounded_bits} bits in float32 are "
        "0, as after 16 bits; " + _AT_THE_HEAD,
        (0, 0.5),
    ),
    (
        "concentration",
        "1",
        f"share of Σ l² in the {100 * BOUNDS.largest_share:g} % of tokens with the largest |l|, from the "
        "histogram",
        None,
    ),
    (
        "temperature_slope",
        "1",
        "Σ l u / Σ u²: 1 − T/T′ if the engine's temperature is T′ instead of T",
        (-0.1, 0.1),
    ),
    (
        "temperature_r2",
        "1",
        "(Σ l u)² / (Σ u² Σ l²): the share of Σ l² that a temperature explains",
        (0, BOUNDS.temperature_r2),
    ),
    ("temperature_z", "1", "temperature_slope in standard errors", None),
    (
        "prefix_slope",
        "1",
        "slope of l over log p among tokens behind the same prompt and response so far, less their means: "
        "1 − T/T′, without entropies; of token records",
        None,
    ),
    ("prefix_r2", "1", "the share of the spread of l behind equal prefixes that it explains", None),
    ("prefix_z", "1", "prefix_slope in standard errors, over prompts", None),
    (
        "prefix_spread",
        "1",
        "variance of l behind equal prefixes, about their means and by degrees of freedom, over the mean of "
        "l² there: near 0 where a filter or a banned token makes the gap, the same for all tokens behind a "
        "prefix; 1 where prefixes tell nothing of l",
        None,
    ),
    (
        "surprisal_excess",
        "nats",
        "mean over tokens of −u: sampled tokens are less likely than the trainer expects",
        None,
    ),
    (
        "surprisal_excess_bound",
        "nats",
        f"√(mean(1/ρ) − 1) · √(mean V) + {BOUNDS.z:g} √(Σ c² V, or Σ c² u² where that is more) / tokens, c: "
        "how often a token counts. Beyond it, up or down, surprisal_excess is not chance where tokens are "
        "drawn from what the engine reports",
        None,
    ),
    # What is healthy depends on the precision (PLAUSIBLE_NOISE) and on the age of the samples: the table of
    # causes judges it.
    (
        "logit_noise",
        "nats",
        "√(Σ l² / Σ g): independent noise on the logits that would make such a gap",
        None,
    ),
    (
        "logit_noise_least",
        "nats",
        "√(Σ l² / 2 Σ (1 − p)²): logit_noise is not below it; of token records without Q",
        None,
    ),
    (
        "logit_noise_most",
        "nats",
        "√(Σ l² / Σ (1 − p)² (1 + exp(−h))), h = (H − h₂(p)) / (1 − p), h₂ the entropy of p and 1 − p: "
        "logit_noise is not above it; without H, exp(−h) counts as 0; of token records without Q",
        None,
    ),
    (
        "logit_noise_floor",
        "nats",
        f"mean of logit_noise in the first {BOUNDS.floor_steps} steps of the run",
        None,
    ),
    (
        "position_{n}_logit_noise",
        "nats",
        "logit_noise of the tokens at one part of the response: it begins at position "
        + ", ".join(map(str, (0, *BOUNDS.position_edges))),
        None,
    ),
    (
        "engine_{n}_logit_noise",
        "nats",
        f"logit_noise of one of several engines; {BOUNDS.engines - 1}: and all later ones",
        None,
    ),
    ("noisiest_engine", "1", "number of the engine with the largest logit_noise", None),
    ("noisiest_engine_ratio", "1", "its logit_noise over that of all others together", None),
    (
        "noisiest_engine_z",
        "1",
        f"standard errors, over sequences, by which its Σ l² / Σ g is above {BOUNDS.engine_noise**2:g} times "
        "that of the others",
        None,
    ),
)

ROLLOUT_CORR = (
    *(MetricSpec(f"rollout_corr/{name}", unit, text, healthy) for name, unit, text, healthy in _DISAGREEMENT),
    *(MetricSpec(f"rollout_corr/rollout_is_{name}", "1", text, healthy) for name, text, healthy in _WEIGHTS),
    *(
        MetricSpec(
            f"rollout_corr/rollout_rs_{{rule}}_{name}",
            "1" if "fraction" in name else "of the statistic",
            text,
            healthy,
        )
        for name, text, healthy in _RULE
    ),
    *(MetricSpec(f"rollout_corr/{name}", "1", text, healthy) for name, text, healthy in _OUTCOME),
    *(MetricSpec(f"rollout_corr/{name}", unit, text, healthy) for name, unit, text, healthy in _FULL),
    *(MetricSpec(f"rollout_corr/{name}", unit, text, healthy) for name, unit, text, healthy in _SIGNATURES),
)
"""Entries of this section."""
