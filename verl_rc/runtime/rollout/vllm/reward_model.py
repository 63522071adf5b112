"""The reward model in a vLLM engine."""

from collections.abc import Sequence

import torch
from vllm import LLM, PoolingParams
from vllm.inputs import tokens_input

from verl_rc.config.rollout import DEFAULT_CPU_CACHE_MEGABYTES
from verl_rc.config.task import RewardModelConfig
from verl_rc.runtime.rollout.vllm import engine_worker
from verl_rc.runtime.rollout.vllm.llm import release_shared_memory
from verl_rc.runtime.workers.reward_model_worker import RewardModelWorker


class VllmRewardModel(RewardModelWorker):
    """The model as vLLM computes it; it lives alone in its process."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Build the engine. Raises ``ValueError`` like ``RewardModelWorker``, and for a model that vLLM does
        not read at its last token."""
        super().__init__(config, torch.device("meta"))
        size = config.rollout.tensor_model_parallel_size
        memory = (
            {"gpu_memory_utilization": config.rollout.gpu_memory_utilization}
            if config.n_gpus_per_node
            else {"kv_cache_memory_bytes": DEFAULT_CPU_CACHE_MEGABYTES << 20}
        )
        self._llm = LLM(
            model=str(config.model_path),
            runner="pooling",
            convert="classify",
            dtype=config.dtype,
            max_model_len=self._max_length,
            tensor_parallel_size=size,
            distributed_executor_backend="uni" if size == 1 else "mp",
            enforce_eager=True,
            trust_remote_code=config.trust_remote_code,
            worker_extension_cls=engine_worker.EXTENSION,
            disable_log_stats=True,
            **memory,
        )
        release_shared_memory(self._llm)
        pooler = self._llm.llm_engine.vllm_config.model_config.pooler_config
        if pooler.seq_pooling_type != "LAST":
            raise ValueError(
                f"reward.reward_model.rollout.name=vllm serves models with the score at the last token, "
                f"{config.model_path!r} has {pooler.seq_pooling_type}; write rollout.name=null."
            )

    def _logits(self, token_ids: Sequence[list[int]]) -> list[float]:
        """See ``RewardModelWorker``."""
        if not token_ids:  # which vLLM refuses
            return []
        outputs = self._llm.encode(
            [tokens_input(self._without_padding(ids)) for ids in token_ids],
            PoolingParams(use_activation=False),  # by default vLLM returns the logit's sigmoid
            pooling_task="classify",
            use_tqdm=False,
        )
        return [output.outputs.data.item() for output in outputs]

    def _without_padding(self, token_ids: list[int]) -> list[int]:
        """Drop padding at the end, such as EOS where it is the padding token: vLLM reads the last token."""
        length = len(token_ids)
        while length > 1 and token_ids[length - 1] == self._pad_token_id:
            length -= 1
        return token_ids[:length]
