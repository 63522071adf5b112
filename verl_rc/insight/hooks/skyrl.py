"""SkyRL needs no hook: ``trainer.dump_data_batch=true`` writes both log-probs of every token below
``trainer.export_path``, which ``verl-rc report`` reads.

At a temperature other than 1 its engine's log-probs are raw unless
``generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs`` is passed. Rewards are
popped before the dump, and no function before the update has entropies. Read at SkyRL 0.3.0.
"""
