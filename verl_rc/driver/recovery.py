"""Replacing engines that died or hang, so that a run goes on without them."""

from verl_rc.cluster.engine_group import EnginesLostError
from verl_rc.cluster.remote import RemoteError, wait_for_all
from verl_rc.driver.announce import say
from verl_rc.driver.services import Services
from verl_rc.driver.step_record import StepRecord


def replace_engines(services: Services, lost: EnginesLostError, record: StepRecord) -> None:
    """Start new engines in the places of those lost and connect them to the trainer; they have no weights yet.

    Raises ``RemoteError`` when more than ``rollout.max_engine_replacements`` were lost in one step, and ``EnginesLostError`` when
    others are lost meanwhile.
    """
    limit = services.config.actor_rollout_ref.rollout.max_engine_replacements
    record.engines_replaced += len(lost.engines)
    if record.engines_replaced > limit:
        raise RemoteError(
            f"at most actor_rollout_ref.rollout.max_engine_replacements={limit} engines are replaced in one step, but "
            f"{record.engines_replaced} were lost, the last: {lost}. Look for what kills them (memory?), or raise the limit."
        ) from lost
    say("replacing %d rollout engine(s): %s", len(lost.engines), str(lost).partition("\n")[0])
    wait_for_all(services.engines.replace(lost.engines), services.config.trainer.ready_timeout_seconds)
    services.transport.open()
    services.engines.sleep()
