"""Parts of a batch that metrics tell apart by name: stages of a step, accounts of the ledger; percentiles,
ages, turns, signs and answers of tokens."""

PERCENTS = (1, 5, 25, 50, 75, 95, 99)
NUM_AGES = NUM_TURNS = 5
"""Ages and turns are told apart up to the last of these, which stands for all above it, too."""
SIGNS = ("positive_advantage", "negative_advantage")
ANSWERS = ("correct", "wrong")

STAGES = {
    "gen": "sample responses",
    "admit": "draw prompts and hand them to the engines (asynchronous training)",
    "reward": "score responses",
    "find_rejected": "log-probs for finding groups that algorithm.max_refills replaces",
    "old_log_prob": "log-probs of the proximal policy",
    "ref": "log-probs of the reference policy",
    "teacher": "log-probs of the teacher",
    "values": "the critic's values",
    "adv": "rollout correction and advantages on the driver",
    "correction_statistics": "extra pass that some corrections need before the loss",
    "update_critic": "update the critic",
    "update_actor": "update the actor",
    "update_weights": "send the new weights to the engines and check that they arrived",
    "sync_canary": "generate and check canary tokens",
    "testing": "validate",
    "save_checkpoint": "write a checkpoint: the part that the loop waits for",
    "dump_rollout_generations": "write rollouts to disk",
    "token_records": "write token records to disk",
}
"""The work of each stage of a step, by name."""

TOKEN_ACCOUNTS = {
    "trained": "in the loss of an update that was taken, in the first epoch",
    "rejected": "left out by rollout correction; where the actor corrects, in the first epoch; and of "
    "prompts that algorithm.max_refills replaced",
    "truncated": "of responses that algorithm.mask_truncated_responses left out",
    "nonfinite": "in the loss of an update skipped because its gradient was not finite",
    "overflow": "in the loss of an update skipped because gradient · actor/loss_scale overflowed float16",
    "withheld": "of a batch that critic warm-up or an alert withheld from the actor",
    "filtered": "of prompts that algorithm.filter_groups dropped",
    "surplus": "of prompts beyond data.train_batch_size after filtering",
    "baseline": "of greedy responses that serve as a baseline only (remax)",
}
"""Every account of a step's tokens and what is booked to it."""
PROMPT_ACCOUNTS = {
    "in_batch": "that the batch consists of",
    "filtered": "that algorithm.filter_groups dropped",
    "surplus": "beyond data.train_batch_size after filtering",
    "rejected": "of which rollout correction kept no token, and which algorithm.max_refills replaced",
}
"""Every account of a step's prompts."""
