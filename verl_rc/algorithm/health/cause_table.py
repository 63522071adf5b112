"""THE table of causes: everything that makes engine and trainer differ, in the words that users see.

Alerts, verdict, diagnosis and docs/see_why.md read it. A row says what the cause is called, what to
do about it, and what names it. The rules that look at a whole run or at replays are in
``verl_rc.insight.verdict``, the rows that signatures name in ``verl_rc.algorithm.health.signature_causes``.
"""

from collections.abc import Mapping

from verl_rc.algorithm.health.cause import NO_CORRECTION, ROLLOUT, Cause
from verl_rc.algorithm.health.signature_causes import SIGNATURE_CAUSES
from verl_rc.metrics.bounds import BOUNDS

STOP_LOST = Cause(
    21,
    "finished rows without a stop token",
    "token records: the last id of a finished row is no stop token",
    (
        "{count:.0f} of {rows:.0f} rows that are called finished do not end with a stop token: ids were lost "
        "or changed between engine and trainer, or rows are not what they are called"
    ),
    (
        "Compare the ids that the engine returned with those that were trained on, at the ends of rows. "
        f"{NO_CORRECTION}"
    ),
)
EQUAL_SAMPLES = Cause(
    22,
    "one sample for several requests",
    f"token records: equal ids in a step, by chance at most once in {1 / BOUNDS.chance:,.0f}",
    (
        "{count:.0f} of {rows:.0f} rows have the ids of another row, which independent requests would not "
        "get: an answer was used twice, or requests share a seed"
    ),
    f"Look at how answers are matched to requests, and at the seeds of requests. {NO_CORRECTION}",
)
OUTSIDE_VOCABULARY = Cause(
    23,
    "ids outside the vocabulary",
    "token records: an id below 0, or not below vocab_size",
    "{count:.0f} of {rows:.0f} rows have ids that are none of the vocabulary's",
    (
        "Look for padding or marks of missing tokens among the ids, and compare the tokenizers of engine and "
        f"trainer. {NO_CORRECTION}"
    ),
)
SHIFTED_ROWS = Cause(
    2,
    "log-probs of some rows shifted",
    (
        f"token records: log-probs of {BOUNDS.shifted_rows:.0%} of the rows are {1 / BOUNDS.row_lag:g} times "
        "nearer to those of the tokens beside their own"
    ),
    (
        "In {count:.0f} of {rows:.0f} rows the engine's log-probs agree with those of the tokens beside "
        "their own, and not with their own"
    ),
    f"Compare the ids of these rows that were sampled with those that were trained on. {NO_CORRECTION}",
)
FLOORED = Cause(
    24,
    "log-probs with a floor",
    (
        "token records: the engine's lowest log-prob is the same number for tokens that the trainer tells "
        "apart, which make more than half of the squared gap"
    ),
    (
        "In {count:.0f} of {rows:.0f} rows the engine reports its lowest log-prob, the very same number, for "
        "tokens that the trainer tells apart: below it, log-probs are cut or filled in"
    ),
    (
        "Look for a clamp of log-probs, a fill value, or the last of the most likely tokens in place of a "
        "sampled one that is not among them; have the engine report the sampled token's own. "
        f"{NO_CORRECTION}"
    ),
)
OUTSIDE_MASK = Cause(
    25,
    "sampled tokens outside the mask",
    "token records: a token with the engine's log-prob is not marked, in rows where others are",
    (
        "In {count:.0f} of {rows:.0f} rows tokens that have the engine's log-prob are outside response_mask: "
        "they were sampled and are not trained"
    ),
    (
        "Compare the mask of a row with its ids: a mask that is shifted leaves out the first or the last "
        "sampled token. Nothing is wrong where a trainer leaves tokens out on purpose (old or forced ones)."
    ),
    level="notice",
)
INVARIANTS = (STOP_LOST, EQUAL_SAMPLES, OUTSIDE_VOCABULARY, SHIFTED_ROWS, FLOORED, OUTSIDE_MASK)
"""Causes that token records show without statistics."""
OVERFLOW = Cause(
    1,
    "overflow or empty logits",
    "non-finite or clamped log-ratios",
    (""),
    ("Run ten steps with the engine in float32; if it stays, look at the logits of the longest rows."),
    overrides=(f"{ROLLOUT}.dtype=float32",),
    evidence="tokens",
)
NOT_A_TEMPERATURE = Cause(
    8,
    "the gap follows log-probs, not as a temperature does",
    (
        f"row 8, but the slope grows over the run, by more than {BOUNDS.temperature_slope:g} and "
        f"{BOUNDS.steady_slope:.0%} of itself, or the gap is no straight line over log-probs: its bend "
        f"explains more than {BOUNDS.bend:.0%} of it, by {BOUNDS.z:g} standard errors"
    ),
    (""),
    (
        "Compare the logits of the same tokens on both sides: a soft cap, a penalty or a rounded head bends "
        "the gap. Where it grows with updates, some weights do not arrive: verl-rc diagnose ENGINE --digests "
        f"CHECKPOINT names the tensors that differ. {NO_CORRECTION}"
    ),
    evidence="run",
    is_specific=False,
)
STALENESS = Cause(
    16,
    "staleness",
    "√k3 is linear in age",
    (
        "The gap grows with the age of a token, {slope:.4f} nats per step: {floor:.4f} at the youngest, "
        "{oldest_gap:.4f} at age {oldest:.0f} (r² {r:.2f})"
    ),
    ("Correct it with token weights, or let the engines be fewer steps behind."),
    evidence="run",
    level="notice",
)
DRIFT = Cause(
    17,
    "drift within the step",
    (
        f"bypass mode: over all updates of a step √(2 k3) > {BOUNDS.drift:g} and {BOUNDS.above_floor:g} "
        "times the logit noise before the first"
    ),
    (
        "Over all updates of a step the policy is {drift:.4f} nats a token from the log-probs that it was "
        "sampled with; before the first one logit noise is {noise:.4f} ({count:.0f} of {steps:.0f} steps). "
        "It moves away while it learns from the batch"
    ),
    ("Fewer updates a step (larger mini-batches, one epoch), a lower learning rate or a tighter clip."),
    evidence="run",
    level="notice",
)
WEIGHTS_NEVER_ARRIVE = Cause(
    18,
    "weights never arrive",
    "the gap is linear in all that was learned",
    (
        "The gap grows with all that the policy has learned, from {first:.4f} to {last:.4f} nats: "
        "{slope:.2f} for each nat of movement, r² {r:.2f}. The engine still has the weights it started with"
    ),
    (
        "Compare a tensor of the engine with the trainer's after a sync; verl_rc's canary compares log-probs "
        f"at every update with canary_freq=1. {NO_CORRECTION}"
    ),
    evidence="run",
)
LOST_IN_ROUNDING = Cause(
    26,
    "updates lost in rounding",
    f"median of sync/update_survival < {BOUNDS.survival:g}, in {BOUNDS.fewest_survivals} steps or more",
    (
        "Rounding in the engines leaves {survival:.0%} of an update of the weights, along it (median of "
        "{count:.0f} steps in which it was measured): they sample from weights of earlier steps"
    ),
    (
        "Let the engines hold more precise weights (rollout.quantization=null, rollout.dtype), or with LoRA "
        "send adapters alone (model.lora.merge=False)."
    ),
    evidence="run",
    level="notice",
)
ONE_VERSION_LATE = Cause(
    19,
    "one version late",
    "the gap follows the update before",
    (
        "The gap follows the update before it (r² {r:.2f}): {gap:.4f} nats on average, {first:.4f} in the "
        "first step, which had none. The engine samples with weights that are one version old"
    ),
    ("Look at the order of weight update and sampling; wait for the sync before the next batch."),
    evidence="run",
)
MISSED_UPDATE = Cause(
    19,
    "an update was missed",
    f"logit noise (else mean |log-ratio|) jumps to {BOUNDS.far_above_floor:g} times that of the start in "
    f"single steps, mean |log-ratio| to {BOUNDS.above_floor:g} times the usual",
    (
        "The gap was {peak:.3f} in step {step:.0f} or after ({count:.0f} of {steps:.0f} steps), "
        "{first:.3f} at the start, and as before in between: the engine sampled those steps with other "
        "weights"
    ),
    (
        "verl-rc diagnose RUN --replay R3 says with which, where checkpoints were saved; look at the log for "
        "what delayed or skipped a weight update."
    ),
    evidence="run",
    level="notice",
)
ROUNDING = Cause(
    11,
    "rounding",
    "none, gap as at the start",
    (""),
    (""),
    evidence="run",
    level="good",
    is_specific=False,
)
LARGE = Cause(
    20,
    "large from the start, cause not separable by metrics",
    (
        f"logit noise of the first steps is {BOUNDS.far_above_floor:g} times what rounding makes in this "
        "precision"
    ),
    (""),
    (
        "verl-rc diagnose RUN --replay tells a trainer that scores other inputs (prompts, padding, dropout) "
        "and older weights from the rest."
    ),
    evidence="run",
    is_specific=False,
)
BEYOND_ROUNDING = Cause(
    20,
    "larger than rounding, cause not separable by metrics",
    (
        "mean |log-ratio| of neighbouring steps > √(1 - exp(-entropy)) times the noise from which on that of "
        "the first steps is called large"
    ),
    (""),
    LARGE.next_test,
    evidence="run",
    is_specific=False,
)
GROWN = Cause(
    20,
    "grown, cause not separable by metrics",
    "none, gap grown",
    (""),
    (
        "Old weights, weights that differ a little, trainer noise (dropout), routing and kernels look alike "
        "here. If samples may be older than the trainer's weights, record the version of each token: the gap "
        "by age tells. Else run ten steps with the engine in float32 and without prefix caching, one change "
        "at a time."
    ),
    overrides=(f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.enable_prefix_caching=False"),
    evidence="run",
    is_specific=False,
)
OTHER_INPUTS = Cause(
    15,
    "the trainer scores other inputs or with noise",
    "R0: the trainer's recorded log-probs do not come out again",
    (""),
    (
        "Compare prompts, positions and masks of the trainer's forward pass with the recorded ids; turn "
        "dropout off."
    ),
    evidence="replays",
)
OLDER_WEIGHTS = Cause(
    18,
    "older weights",
    "R3: older weights explain the engine at least twice as well",
    (
        "The engine sampled step {step:.0f} with weights near version {nearest_version:.0f} and not "
        "{reported_version:.0f}: its log-probs are {distance:.4f} nats from those, {gap:.4f} from these"
    ),
    (
        "Compare a tensor of the engine with the trainer's after a sync; look at what skips or delays a "
        "weight update."
    ),
    overrides=(f"{ROLLOUT}.sync_proof.canary_freq=1",),
    evidence="replays",
)

RUN_CAUSES = (
    OVERFLOW,
    NOT_A_TEMPERATURE,
    STALENESS,
    DRIFT,
    LOST_IN_ROUNDING,
    WEIGHTS_NEVER_ARRIVE,
    ONE_VERSION_LATE,
    MISSED_UPDATE,
    ROUNDING,
    LARGE,
    BEYOND_ROUNDING,
    GROWN,
)
"""Causes that the report names from the course of a run."""
REPLAY_CAUSES = (OTHER_INPUTS, OLDER_WEIGHTS)
CAUSES: Mapping[str, Cause] = {
    cause.name: cause for cause in reversed((*INVARIANTS, *SIGNATURE_CAUSES, *RUN_CAUSES, *REPLAY_CAUSES))
}
"""The whole table by name; of two rules that name one cause, the row of the first."""
