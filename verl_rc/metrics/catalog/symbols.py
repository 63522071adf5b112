"""The symbols and words that formulas of the catalogue are written in."""

SYMBOLS = {
    "response token": "a token that the policy produced: no prompt, no padding, no tool output",
    "token": "under rollout_corr/: a response token with two finite log-probs, before rejection",
    "sequence": "a prompt with one response; under rollout_corr/: one that has such a token",
    "update": "one optimizer update: of one mini-batch in one epoch",
    "age": "step − 1 − policy version that sampled the token",
    "entropy": "with a sampling filter: of the distribution over its support, as are KL estimates",
    "l": "train log-prob − rollout log-prob of a token, nats; ρ = exp(l)",
    "L": "Σ l over the tokens of a sequence; m = L / their number",
    "v": "raw importance weight, before rollout_is_threshold; w = the applied weight, after the threshold "
    "and before rollout_is_batch_normalize",
    "weights": "one of each token; with rollout_is=sequence or geometric, one of each sequence",
    "s": "statistic of a rejection rule: of a token, or of a sequence for the rules seq_*. k1 rules have −l, "
    "−L or −m; their bounds, and high and low, are those of the ratio exp(−s)",
    "high": "above the upper threshold of a weight or bound of a rule; low = below the lower one (weights "
    "without one: 1/upper; rules but k1: 0)",
    "n": "number of values that a mean, a standard deviation or a test is over; std: population standard "
    "deviation",
    "t": "position of a token in the response",
    "A": "advantage",
    "current": "the policy that an update changes; old = the proximal policy, in bypass mode the rollout "
    "policy",
    "p": "trainer's probability of the token; u = log p + H",
    "Σ": "sum over tokens, where nothing else is said",
    "H": "entropy of the trainer's distribution at the token; V = variance of u under this distribution",
    "Q": "Σ of the squared probabilities of this distribution; g = 1 − 2p + Q",
}
"""Meanings by symbol or word, in the order of docs/metrics.md. A meaning may define a second symbol from the
first."""
