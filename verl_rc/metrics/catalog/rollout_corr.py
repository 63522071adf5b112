"""Rollout correction: how far trainer and rollout policy disagree, and what the weights and rules did about
it."""

from verl_rc.metrics.bounds import BOUNDS, LOG_RATIO_BOUND
from verl_rc.metrics.catalog.spec import Bounds, MetricSpec
from verl_rc.metrics.splits import ANSWERS, SIGNS

_NEAR_0: Bounds = (-BOUNDS.z, BOUNDS.z)

_DISAGREEMENT: tuple[tuple[str, str, str, Bounds | None], ...] = (
    (
        "{policy}_log_ppl",
        "nats",
        "mean over sequences of −(their mean train or rollout log-prob)",
        None,
    ),
    (
        "{policy}_ppl",
        "1",
        "mean over sequences of exp(−(their mean train or rollout log-prob))",
        None,
    ),
    (
        "log_ppl_diff",
        "nats",
        "mean over sequences of −m: training − rollout log-perplexity",
        (-0.1, 0.1),
    ),
    ("log_ppl_abs_diff", "nats", "mean over sequences of |m|", (0, 0.1)),
    ("log_ppl_diff_{extreme}", "nats", "−m, over sequences", None),
    (
        "ppl_ratio",
        "1",
        "mean over sequences of exp(−m): training / rollout perplexity",
        (0.9, 1.1),
    ),
    (
        "kl",
        "nats",
        "mean over tokens of −l: estimator k1 of KL(rollout || train), may be negative",
        (-0.01, 0.1),
    ),
    (
        "k3_kl",
        "nats",
        "mean over tokens of ρ − l − 1: estimator k3 of KL(rollout || train), never negative",
        (0, 0.1),
    ),
    ("chi2_token", "1", "(mean over tokens of ρ²) − 1, may be negative", (-0.1, 1)),
    (
        "chi2_seq",
        "1",
        "(mean over sequences of exp(L)²) − 1; a large value is that of a few sequences",
        None,
    ),
)
_WEIGHTS: tuple[tuple[str, str, Bounds | None], ...] = (
    ("mean", "mean over tokens of w", (0.5, 2)),
    ("std", "std over tokens of w", (0, 1)),
    ("{extreme}", "w, over weights", None),
    ("eff_sample_size", "(Σ w)² / (n Σ w²) over weights", (0.5, 1)),
    (
        "ratio_fraction_{side}",
        "weights with high or low v / weights",
        (0, 0.1),
    ),
    ("seq_mean", "mean over sequences of their mean w", (0.5, 2)),
    ("seq_std", "std (n − 1) over sequences of their mean w", None),
    ("seq_{extreme}", "mean w of a sequence, over sequences", None),
    ("seq_max_deviation", "maximum over sequences of |their mean w − 1|", (0, 1)),
    (
        "seq_fraction_{side}",
        "sequences with a high or low mean v / sequences",
        (0, 0.1),
    ),
    (
        "oob_ratio",
        "tokens with v outside the two thresholds / tokens",
        (0, 0.1),
    ),
    (
        "batch_norm_factor",
        "mean over weights of w, by which rollout_is_batch_normalize divides",
        (0.5, 2),
    ),
)
_RULE: tuple[tuple[str, str, Bounds | None], ...] = (
    ("mean", "mean over tokens of s, their own or that of their sequence", None),
    ("std", "std over tokens of s clamped to the rule's bounds", None),
    (
        "{extreme}",
        "s; with a k1 rule, the maximum belongs to the lowest ratio",
        None,
    ),
    (
        "fraction_{side}",
        "high or low values / values",
        None,
    ),
    (
        "seq_{statistic}",
        "mean s of a sequence, over sequences; std with n − 1",
        None,
    ),
    ("seq_max_deviation", "maximum over sequences of |their mean s|", None),
    (
        "seq_fraction_{side}",
        "sequences with a high or low mean / sequences",
        None,
    ),
    (
        "masked_fraction",
        "tokens that this rule rejects / tokens (opsm: response tokens)",
        (0, 0.1),
    ),
    ("seq_masked_fraction", "sequences with a token that this rule rejects / sequences", (0, 0.1)),
)
_OUTCOME: tuple[tuple[str, str, Bounds | None], ...] = (
    (
        "rollout_rs_masked_fraction",
        "response tokens rejected for any reason / response tokens",
        (0, 0.1),
    ),
    ("rollout_rs_seq_masked_fraction", "sequences with a rejected response token / sequences", (0, 0.1)),
    ("rollout_is_veto_fraction", "sequences that the veto rejects / sequences", (0, 0.1)),
    (
        "rollout_is_catastrophic_token_fraction",
        "tokens with ρ < rollout_token_veto_threshold / tokens",
        (0, 0.001),
    ),
    (
        "nonfinite_token_fraction",
        "response tokens with a log-prob that is NaN or infinite / response tokens",
        (0, 0),
    ),
    (
        "safety_clamped_fraction",
        f"tokens with |l| > {LOG_RATIO_BOUND:g} nats (counted as ±{LOG_RATIO_BOUND:g}) / tokens",
        (0, 0.001),
    ),
    (
        "rollout_rs_seq_rejected_fraction",
        "sequences with every response token rejected / sequences",
        (0, 0.1),
    ),
    (
        "rollout_rs_adaptive_threshold",
        "upper bound u of the ratio, the lower is 1/u; with rollout_rs_target_acceptance",
        None,
    ),
    (
        "centering_head_mass",
        "mean over the loss mask and updates of the rollout policy's mass on the tokens that the engine "
        "reports; with score_centering, as drift_norm",
        None,
    ),
    (
        "drift_norm",
        "mean over the loss mask and updates of the norm of (rollout − current probability) over these "
        "tokens and, with tail=proportional, all others as one",
        None,
    ),
    ("skipped_updates", "updates skipped for want of kept tokens", (0, 0)),
)

_FULL: tuple[tuple[str, str, str, Bounds | None], ...] = (
    (
        "log_ratio_p{percent}",
        "nats",
        "percentile over tokens of l, from the histogram (relative error up to 4 %)",
        None,
    ),
    ("log_ratio", "nats", "histogram over tokens of l", None),
    (
        "misalignment_z",
        "1",
        "mean(ρ − 1) / (std(ρ) / √n) over tokens, 0 if all ρ are 1; see missing_mass",
        _NEAR_0,
    ),
    (
        "rollout_is_raw_{statistic}",
        "1",
        "v, over weights",
        None,
    ),
    (
        "rollout_is_p{percent}",
        "1",
        "percentile over weights of v, from the histogram",
        None,
    ),
    (
        "rollout_is_ess_raw_{level}",
        "1",
        "(Σ v)² / (n Σ v²) over tokens, sequences (their mean v) or, in decoupled mode, prompts (the mean of "
        "their sequences)",
        (0.3, 1),
    ),
    (
        "rollout_is_ess_applied_{level}",
        "1",
        "rollout_is_ess_raw_{level} with w in place of v",
        (0.5, 1),
    ),
    (
        "kept_fraction_{split}",
        "1",
        "kept response tokens / response tokens, of one part of the batch: by sign of A "
        f"({' and '.join(SIGNS)}) or score of the sequence ({ANSWERS[0]}, above 0, and {ANSWERS[1]})",
        None,
    ),
    (
        "{fate}_score_mean",
        "reward",
        "mean score of sequences with a kept token (kept) or with none (rejected)",
        None,
    ),
    (
        "token_age_mean",
        "steps",
        "mean over tokens of the age, in asynchronous runs",
        (0, 4),
    ),
    (
        "age_{age}_k3_kl",
        "nats",
        "k3_kl of tokens of this age, the last one or above",
        None,
    ),
    (
        "age_{age}_rejected_fraction",
        "1",
        "rejected response tokens / response tokens, both of this age",
        None,
    ),
    (
        "turn_{turn}_k3_kl",
        "nats",
        "k3_kl of tokens of this turn, the last one or later",
        None,
    ),
)

_AT_THE_HEAD = f"First {BOUNDS.head} positions of every response"
_SIGNATURES: tuple[tuple[str, str, str, Bounds | None], ...] = (
    (
        "missing_mass",
        "1",
        "1 − mean over tokens of ρ; 0 is expected if the engine draws from what it reports",
        None,
    ),
    (
        "missing_mass_z",
        "1",
        "missing_mass / its standard error over sequences",
        _NEAR_0,
    ),
    (
        "lag",
        "tokens",
        f"shift k of −{-min(BOUNDS.lags)} to {max(BOUNDS.lags)} with the smallest mean of |train log-prob at "
        f"t − rollout log-prob at t + k|; 0 unless that at k = 0 is above {BOUNDS.lag_distance:g} and twice "
        f"the smallest. {_AT_THE_HEAD}",
        (0, 0),
    ),
    (
        "rounded_fraction",
        "1",
        f"rollout log-probs whose last {BOUNDS.rounded_bits} bits in float32 are 0 / rollout log-probs, but "
        f"for those that are 0. {_AT_THE_HEAD}",
        (0, 0.5),
    ),
    (
        "concentration",
        "1",
        f"Σ l² over the {100 * BOUNDS.largest_share:g} % of tokens with the largest |l| / Σ l², from the "
        "histogram",
        None,
    ),
    (
        "temperature_slope",
        "1",
        "Σ l u / Σ u²: 1 − trainer's / engine's temperature, if nothing else differs",
        (-0.1, 0.1),
    ),
    (
        "temperature_r2",
        "1",
        "(Σ l u)² / (Σ u² · Σ l²): the share of Σ l² that another temperature explains",
        (0, BOUNDS.temperature_r2),
    ),
    ("temperature_z", "1", "temperature_slope / its standard error over sequences", None),
    (
        "prefix_slope",
        "1",
        "Σ l′ q / Σ q² over tokens whose prefix (prompt and response before them) other tokens share; l′ = l "
        "and q = log p less their means behind the prefix. temperature_slope without entropies, from token "
        "records only",
        None,
    ),
    (
        "prefix_r2",
        "1",
        "(Σ l′ q)² / (Σ q² · Σ l′²), l′: as in prefix_slope, q: too",
        None,
    ),
    ("prefix_z", "1", "prefix_slope / its standard error over prompts", None),
    (
        "prefix_spread",
        "1",
        "(Σ l′² / (tokens − prefixes)) / (Σ l² / tokens), l′: as in prefix_slope; near 0 with a filter",
        None,
    ),
    (
        "surprisal_excess",
        "nats",
        "mean over tokens of −u; above 0, sampled tokens are less likely than the trainer expects",
        None,
    ),
    (
        "surprisal_excess_bound",
        "nats",
        f"√(mean(1/ρ) − 1) · √(mean V) + {BOUNDS.z:g} · √(max(Σ c² V, Σ c² u²)) / tokens, c = how often the "
        "token counts: bound of |surprisal_excess| if the engine draws from what it reports",
        None,
    ),
    # What is healthy depends on the precision (PLAUSIBLE_NOISE) and on the age of the samples: the table of
    # causes judges it.
    (
        "logit_noise",
        "nats",
        "√(Σ l² / Σ g): std of independent noise on the logits that makes such a gap",
        None,
    ),
    (
        "logit_noise_least",
        "nats",
        "√(Σ l² / (2 Σ (1 − p)²)): lower bound of logit_noise, without Q",
        None,
    ),
    (
        "logit_noise_most",
        "nats",
        "√(Σ l² / Σ (1 − p)² (1 + exp(−h))), h = (H − h₂(p)) / (1 − p), h₂ the entropy of p and 1 − p; "
        "without H, exp(−h) is 0: upper bound of logit_noise, without Q",
        None,
    ),
    (
        "logit_noise_floor",
        "nats",
        f"mean of logit_noise over the first {BOUNDS.floor_steps} steps of the run",
        None,
    ),
    (
        "position_{n}_logit_noise",
        "nats",
        "logit_noise of part n of the response, from positions "
        + ", ".join(map(str, (0, *BOUNDS.position_edges))),
        None,
    ),
    (
        "engine_{n}_logit_noise",
        "nats",
        f"logit_noise of the tokens of engine n; {BOUNDS.engines - 1}: and later ones",
        None,
    ),
    ("noisiest_engine", "1", "number of the engine with the largest engine_{n}_logit_noise", None),
    (
        "noisiest_engine_ratio",
        "1",
        "logit_noise of the noisiest engine / that of all others together",
        None,
    ),
    (
        "noisiest_engine_z",
        "1",
        f"(a − {BOUNDS.engine_noise**2:g} b) / its standard error over sequences, a = Σ l² / Σ g of the "
        "noisiest engine, b = that of all others together",
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
