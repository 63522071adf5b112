"""How far generation may run ahead of training, and what happens at the bound."""

import math
from fractions import Fraction
from typing import Literal

from pydantic import Field

from verl_rc.config.schema import StrictModel


class AsyncTrainingConfig(StrictModel):
    """``async_training.*``: rollouts beside updates, with tokens of bounded age. The default is the synchronous run.

    Ages count training steps: a token of version v (steps done when its weights were published) that step s trains on has the
    age (s - 1) - v. ``publication``: weights handed to the engines, every ``trigger_parameter_sync_step`` steps.
    """

    staleness_threshold: float = Field(0.0, ge=0)
    """Publications that generation may be ahead of training, >= 0: the usual age of what is trained on. 0 with
    ``trigger_parameter_sync_step=1``: synchronous."""
    max_off_policy_threshold: float | None = Field(None, ge=0)
    """The hard bound of ages in publications, at least ``staleness_threshold``: nothing older is trained on. null:
    ``staleness_threshold`` + 1; ``staleness_threshold`` itself where it is 0, and with ``order=admitted``."""
    max_off_policy_strategy: Literal["wait", "drop"] = "wait"
    """What becomes of a group that would pass the hard bound: the trainer waits for it, or it is dropped and another one takes
    its place, which trains on shorter answers than were sampled. ``drop`` needs ``max_off_policy_threshold``."""
    trigger_parameter_sync_step: int = Field(1, ge=1)
    """Training steps from one publication to the next, >= 1."""
    require_batches: int | None = Field(None, ge=1)
    """Mini-batches (``actor.ppo_mini_batch_size`` prompts each) of a step, which is then ``data.train_batch_size``; null: that
    key says it."""
    partial_rollout: bool = True
    """Hand new weights to engines under running responses, which go on with them; False: an engine finishes what it has first, so
    that every response has one version. Without effect in a synchronous run, where nothing runs at a publication."""
    kv_cache_on_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of the KV cache of running responses at a publication: computed again by the new weights, or kept, which is
    cheaper for long contexts and widens the gap between rollout and trainer."""
    order: Literal["auto", "admitted", "ready"] = "auto"
    """Order in which groups are trained on: that of their admission, or that of their completion, the oldest version first.
    ``auto``: ready with partial rollouts, else admitted."""
    max_concurrent_rollouts: int | None = Field(None, ge=1)
    """Samples that one engine works on at once, at most ``rollout.max_num_seqs``; null: as many as that."""
    max_token_age: int | None = Field(None, ge=0)
    """Tokens older than this many steps leave the loss and are counted as rejected; null: none."""
    group_timeout_seconds: float | None = Field(None, gt=0)
    """Longest time from a group's first request to its last answer, seconds; one that takes longer is sampled once more, then
    counted as failed and replaced. null: no limit."""
    deterministic_steps: int | None = Field(None, ge=1)
    """Engine steps per version after which engines wait for new weights, so that partial rollouts are equal to the bit from run
    to run; for tests. null: engines never wait."""
    trace: bool = False
    """Write ``trace.jsonl`` into the run's folder: who did what, when and for which step."""

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
    def ahead(self) -> Fraction:
        """k: ``staleness_threshold`` as it was written, 0.1 as a tenth."""
        return _exact(self.staleness_threshold)

    @property
    def hard_bound(self) -> Fraction:
        """K: the hard bound of ages in publications, null resolved."""
        if self.max_off_policy_threshold is not None:
            return _exact(self.max_off_policy_threshold)
        return self.ahead if self.resolved_order == "admitted" or not self.ahead else self.ahead + 1

    @property
    def oldest(self) -> int:
        """Steps that a token may be old at most when it is trained on: ⌈M (1 + K)⌉ − 1, of k in order of admission."""
        bound = self.ahead if self.resolved_order == "admitted" else self.hard_bound
        return math.ceil(self.trigger_parameter_sync_step * (1 + bound)) - 1

    def groups_in_memory(self, batch: int) -> int:
        """M (1 + k) B: groups that are in flight or wait at once, at most, with ``batch`` prompts a step."""
        return math.ceil(self.trigger_parameter_sync_step * (1 + self.ahead) * batch)


def _exact(value: float) -> Fraction:
    return Fraction(str(value))
