"""How far generation may run ahead of training, and what happens at the bound."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal

from pydantic import Field

from verl_rc.config.schema import StrictModel


class AsyncTrainingConfig(StrictModel):
    """``async_training.*``: rollouts beside updates, with tokens of bounded age. The default is the
    synchronous run.

    Ages count training steps: a token of version v (steps done when its weights were published) that step s
    trains on has the age (s - 1) - v. ``publication``: weights handed to the engines, every
    ``trigger_parameter_sync_step`` steps.
    """

    staleness_threshold: float = Field(0.0, ge=0)
    """Publications that generation may be ahead of training. 0 with ``trigger_parameter_sync_step=1``:
    synchronous."""
    max_off_policy_threshold: float | None = Field(None, ge=0)
    """Largest age of trained tokens, in publications, at least ``staleness_threshold``. null:
    ``staleness_threshold``, plus 1 where it is above 0 and partial rollouts are trained on in the order of
    completion."""
    max_off_policy_strategy: Literal["wait", "drop"] = "wait"
    """``wait``: the trainer waits for a group that would pass this bound. ``drop``: the group is replaced,
    which trains on shorter answers; needs ``max_off_policy_threshold``. For partial rollouts in the order of
    completion."""
    trigger_parameter_sync_step: int = Field(1, ge=1)
    """Training steps between publications. ``trainer.test_freq`` must be a multiple, ``trainer.save_freq`` is
    rounded up to one."""
    require_batches: int | None = Field(None, ge=1)
    """Mini-batches of a step, of ``actor.ppo_mini_batch_size`` prompts each; null: ``data.train_batch_size``
    is the size of a step."""
    partial_rollout: bool = True
    """Running responses go on with new weights. False: engines finish them first. Without effect in a
    synchronous run."""
    kv_cache_on_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of running responses at a publication: computed again by the new weights, or kept, which is
    cheaper and widens the gap."""
    order: Literal["auto", "admitted", "ready"] = "auto"
    """Order in which groups are trained on: that of admission, or that of completion, the oldest version
    first. ``auto``: ready with partial rollouts, else admitted."""
    max_concurrent_rollouts: int | None = Field(None, ge=1)
    """Maximum training samples in progress in one engine, those in tool calls included. null: no limit but
    ``rollout.max_num_seqs``."""
    max_token_age: int | None = Field(None, ge=0)
    """Age in steps above which tokens leave the loss; the advantage baseline keeps their samples. null: no
    limit."""
    group_timeout_seconds: float | None = Field(None, gt=0)
    """Time limit of a group from its first request to its last answer, seconds; null: no limit."""
    deterministic_steps: int | None = Field(None, ge=1)
    """Engine steps per version, after which engines wait for new weights, so that partial rollouts repeat to
    the bit; for tests."""
    trace: bool = False
    """Write ``trace.json``, a timeline of all processes, into the run's folder."""

    @property
    def is_synchronous(self) -> bool:
        """Whether generation and training take turns, step by step."""
        return self.staleness_threshold == 0 and self.trigger_parameter_sync_step == 1

    @property
    def resolved_order(self) -> Literal["admitted", "ready"]:
        """The order of training, ``auto`` resolved."""
        if self.order != "auto":
            return self.order
        in_order = self.is_synchronous or not self.partial_rollout or self.deterministic_steps is not None
        return "admitted" if in_order else "ready"

    @property
    def on_update(self) -> Literal["finish", "recompute", "keep"]:
        """Effect of a publication on running responses: engines finish them first, or
        ``kv_cache_on_update``."""
        return self.kv_cache_on_update if self.partial_rollout and self.staleness_threshold > 0 else "finish"

    @property
    def cuts(self) -> bool:
        """Whether a publication cuts running responses. Without a lead there are none: every admitted group
        is trained on before."""
        return self.on_update != "finish"

    @property
    def staleness(self) -> Fraction:
        """k, which is ``staleness_threshold`` as an exact fraction: 0.1 is a tenth."""
        return _exact(self.staleness_threshold)

    @property
    def hard_bound(self) -> Fraction:
        """K: the hard bound of ages in publications, null resolved."""
        if self.max_off_policy_threshold is not None:
            return _exact(self.max_off_policy_threshold)
        return self.staleness if self.keeps_ages or not self.staleness else self.staleness + 1

    @property
    def keeps_ages(self) -> bool:
        """Whether no group can grow older than k publications. So it is in the order of admission, and where
        responses end before the next publication, because the oldest version is then trained on first."""
        return self.resolved_order == "admitted" or not self.cuts

    @property
    def oldest(self) -> int:
        """The largest age in steps of a token that is trained on: ⌈M (1 + K)⌉ − 1, with k for K where
        ``keeps_ages``."""
        bound = self.staleness if self.keeps_ages else self.hard_bound
        return math.ceil(self.trigger_parameter_sync_step * (1 + bound)) - 1

    @property
    def usual_age(self) -> int:
        """The smallest age in steps of a token that is trained on, once generation is as far ahead as it may
        be and no response is cut: ⌊M k⌋."""
        return math.floor(self.trigger_parameter_sync_step * self.staleness)

    def rounded_to_publications(self, steps: int) -> int:
        """A frequency in steps, rounded up so that only steps that publish are met; <= 0 means never."""
        return (
            -(-steps // self.trigger_parameter_sync_step) * self.trigger_parameter_sync_step
            if steps > 0
            else steps
        )

    def groups_in_memory(self, batch: int) -> int:
        """M (1 + k) B, the largest number of groups in flight or waiting; B is ``batch``, the prompts of a
        step."""
        return math.ceil(self.trigger_parameter_sync_step * (1 + self.staleness) * batch)


def _exact(value: float) -> Fraction:
    return Fraction(str(value))


SECTION = "async_training"
NEEDS_ASYNCHRONY = (
    "max_off_policy_threshold",
    "max_off_policy_strategy",
    "order",
    "kv_cache_on_update",
    "max_token_age",
    "group_timeout_seconds",
    "deterministic_steps",
    "max_concurrent_rollouts",
)
"""Keys that a synchronous run refuses unless they have their default."""
_AGE_KEYS = ("max_off_policy_threshold", "max_off_policy_strategy")
_CUT_RESPONSE_KEYS = ("deterministic_steps", "kv_cache_on_update")


def unread_keys(options: AsyncTrainingConfig) -> Iterator[tuple[Sequence[str], str, str]]:
    """Yield keys of this section that have no effect beside the others, the reason, and what to do where one
    of them was set; an empty text: it may be set."""
    ahead = f"{SECTION}.staleness_threshold={options.staleness_threshold:g}"
    if options.is_synchronous:
        reason = f"in a synchronous run ({ahead} and trigger_parameter_sync_step=1)"
        yield ("partial_rollout",), reason, ""
        yield NEEDS_ASYNCHRONY, reason, "raise one of these, or drop it"
        return
    no_lead = f"without a lead ({ahead}): all that is admitted is trained on before the next publication"
    uncut = f"with {SECTION}.partial_rollout=False, where"
    if not options.staleness:
        yield ("partial_rollout",), no_lead, ""
    if not options.cuts:
        cause = f"with {ahead}, where" if options.partial_rollout else uncut
        yield _CUT_RESPONSE_KEYS, f"{cause} weights never change under a response", "drop one of them"
    if options.resolved_order == "admitted":
        reason = f"in the order of admission, in which nothing grows older than {ahead}"
        yield _AGE_KEYS, reason, f"drop it, or pass {SECTION}.order=ready"
    elif not options.staleness:
        yield _AGE_KEYS, no_lead, "raise that, or drop it"
    elif not options.partial_rollout:
        reason = f"{uncut} all responses end before the next publication and nothing grows too old"
        yield _AGE_KEYS, reason, "drop it"
    publishes_every_step = options.trigger_parameter_sync_step == 1
    if not options.partial_rollout and publishes_every_step and options.staleness.denominator == 1:
        reason = f"{uncut} all responses of a version end before the next: the oldest are the lowest numbers"
        remedy = "pass order=admitted, or raise trigger_parameter_sync_step"
        yield ("order",), reason, remedy if options.order == "ready" else ""
