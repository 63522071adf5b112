"""Replacing engines that died or hang, so that a run goes on without them."""

from dataclasses import dataclass

from verl_rc.cluster.engine_group import EngineGroup, EnginesLostError
from verl_rc.cluster.remote import RemoteError, wait_for_all
from verl_rc.cluster.weight_transport import WeightTransport
from verl_rc.config.run import RunConfig
from verl_rc.driver.announce import say


@dataclass
class Recovery:
    """What was recovered since the last step was logged."""

    engines_replaced: int = 0

    def replace(self, lost: EnginesLostError, engines: EngineGroup, transport: WeightTransport, config: RunConfig) -> None:
        """New engines in the places of those lost, on the way that weights take, but without weights yet.

        Raises ``RemoteError`` when more than ``rollout.max_engine_replacements`` were lost in one step, and ``EnginesLostError``
        when others are lost meanwhile.
        """
        limit = config.actor_rollout_ref.rollout.max_engine_replacements
        self.engines_replaced += len(lost.engines)
        if self.engines_replaced > limit:
            raise RemoteError(
                f"at most actor_rollout_ref.rollout.max_engine_replacements={limit} engines are replaced in one step, but "
                f"{self.engines_replaced} were lost, the last: {lost}. Look for what kills them (memory?), or raise the limit."
            ) from lost
        say("replacing %d rollout engine(s): %s", len(lost.engines), str(lost).partition("\n")[0])
        wait_for_all(engines.replace(lost.engines), config.trainer.ready_timeout_seconds)
        transport.open()
        engines.sleep()

    def take_counts(self, engines: EngineGroup) -> dict[str, float]:
        """``recovery/*`` of the step, counted from zero again afterwards."""
        counts = {
            "recovery/engines_replaced": float(self.engines_replaced),
            "recovery/requests_reissued": float(engines.requests_reissued),
        }
        self.engines_replaced = engines.requests_reissued = 0
        return counts
