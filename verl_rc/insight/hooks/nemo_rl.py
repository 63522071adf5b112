"""NeMo-RL needs no hook: it writes both log-probs of every token by default, which
``verl-rc report logs/exp_NNN`` reads, unless ``env.should_log_nemo_gym_responses`` is set.

Its engine's log-probs are those of the sampled distribution where
``policy.generation.vllm_cfg.logprobs_mode=processed_logprobs`` is set, as its examples do. No function before
the update has entropies. Read at its sources of November 2026.
"""
