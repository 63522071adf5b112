"""Distillation on the policy's own samples: a teacher's log-probs of them, and the loss made of both, with
verl's keys."""

from typing import Literal

from pydantic import Field

from verl_rc.config.models import KlKind
from verl_rc.config.schema import StrictModel, UserPath, follows

_LOSS = "distillation.distillation_loss"


class TeacherConfig(StrictModel):
    """``distillation.teacher_models.NAME.*``: a frozen policy on the trainer's ranks, of any shape, with the
    tokenizer of the trained model."""

    model_path: UserPath
    """Hugging Face model folder or hub id."""
    key: str | None = None
    """Its rows: those with this ``data_source``. null: all, for the only teacher."""


class DistillationLossConfig(StrictModel):
    """``distillation.distillation_loss.*``: the loss of the teacher's log-probs."""

    loss_mode: KlKind | Literal["forward_kl_topk"] = "k3"
    """Estimate of KL(current || teacher) of each sampled token (``k1`` needs ``use_policy_gradient``), or
    ``forward_kl_topk``: KL(teacher || current) over the teacher's ``topk`` likeliest tokens."""
    topk: int = Field(32, ge=1)
    """``forward_kl_topk``: number of tokens."""
    log_prob_min_clamp: float | None = Field(None, lt=0)
    """``forward_kl_topk``: lower bound of log-probs, nats; null: none."""
    use_policy_gradient: bool = False
    """True: minus the estimate is the token's advantage in a clipped policy loss. False: the estimate is
    differentiated (docs/distillation.md)."""
    use_task_rewards: bool = True
    """Train on the task's rewards too."""
    distillation_loss_coef: float = Field(1.0, ge=0)
    """Weight of the teacher's term beside the task's."""
    loss_max_clamp: float | None = Field(None, gt=0)
    """Largest absolute value of a token's estimate, nats; null: none."""
    clip_ratio: float = Field(0.2, ge=0)
    """``use_policy_gradient``: clip range of the policy loss on both sides."""
    clip_ratio_low: float = follows(f"{_LOSS}.clip_ratio", ge=0)
    """``use_policy_gradient``: clip range below 1."""
    clip_ratio_high: float = follows(f"{_LOSS}.clip_ratio", ge=0)
    """``use_policy_gradient``: clip range above 1."""


class DistillationConfig(StrictModel):
    """``distillation.*``."""

    enabled: bool = False
    """Train on a teacher's log-probs of the sampled tokens."""
    teacher_models: dict[str, TeacherConfig] = {}
    """Teachers by a name of yours, each with its ``model_path`` and, where there are several, ``key``: the
    ``data_source`` of its rows."""
    distillation_loss: DistillationLossConfig = DistillationLossConfig()
    """The loss of the teacher's log-probs."""

    @property
    def teachers(self) -> dict[str, TeacherConfig]:
        """The teachers of the run by name; none where it is not enabled."""
        return self.teacher_models if self.enabled else {}

    def role(self, name: str) -> str:
        """The role of a teacher in ``RunConfig.frozen_policies``."""
        return "teacher" if len(self.teachers) == 1 else f"teacher {name}"

    @property
    def loss(self) -> DistillationLossConfig | None:
        """The loss of the teacher's log-probs. None without a teacher."""
        return self.distillation_loss if self.enabled else None

    @property
    def top_tokens(self) -> int:
        """Number of the teacher's likeliest tokens that the loss reads at each position. 0 if it reads the
        sampled token alone."""
        loss = self.loss
        return loss.topk if loss is not None and loss.loss_mode == "forward_kl_topk" else 0

    @property
    def has_task_loss(self) -> bool:
        """Whether the task's rewards are trained on."""
        return not self.enabled or self.distillation_loss.use_task_rewards
