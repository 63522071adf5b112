"""One rank of the reference policy: scores tokens and never learns."""

from collections.abc import Sequence

from torch import Tensor

from verl_rc.config.run import RunConfig
from verl_rc.data.batches import TokenBatch
from verl_rc.distributed.process_group import RankAddress, join_trainer_group, leave_trainer_group, trainer_device
from verl_rc.workers.forward import ForwardOptions, score_tokens
from verl_rc.workers.language_model import load_causal_lm, torch_dtype
from verl_rc.workers.micro_batches import score_sequences
from verl_rc.workers.sharded_model import ShardedModel


class ReferenceWorker:
    """The reference model on one rank: frozen FSDP2 shards."""

    def __init__(self, config: RunConfig, address: RankAddress, total_steps: int) -> None:
        """Join the reference's group, load the model and shard it; ``total_steps`` means nothing to a frozen model."""
        del total_steps
        model, reference = config.actor_rollout_ref.model, config.actor_rollout_ref.ref
        self._device = trainer_device(config.trainer.device)
        mesh = join_trainer_group(address, self._device)
        module = load_causal_lm(
            str(reference.model_path),
            torch_dtype(reference.fsdp_config.model_dtype),
            gradient_checkpointing=False,
            trust_remote_code=model.trust_remote_code,
            mesh=mesh,
        )
        self.model = ShardedModel(module, mesh, reference.fsdp_config, learning=None)
        self._forward = ForwardOptions(config.actor_rollout_ref.rollout.temperature, model.use_remove_padding)

    def compute_log_probs(self, tokens: TokenBatch, micro_batches: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probs ``[B, R]`` of the given rows' response tokens."""

        def score(part: TokenBatch) -> list[Tensor]:
            return [score_tokens(self.model.module, part, self._forward, with_entropy=False).log_probs]

        with self.model.in_use() as module:
            # No dropout: the divergence from the policy would be noise.
            module.eval()
            return score_sequences(tokens, micro_batches, score, self._device)

    def close(self) -> None:
        """Leave the process group."""
        leave_trainer_group()
