"""What vLLM loads in every worker process of an engine, beside its own worker."""

from verl_rc.rollout.leftovers import end_with_parent, forget_shared_memory_names
from verl_rc.weight_sync.receiver import ReceiptExtension


class EngineWorkerExtension(ReceiptExtension):
    """Methods that ``collective_rpc`` finds in every worker."""

    def forget_shared_memory_names(self) -> None:
        """See the function of that name."""
        forget_shared_memory_names()


end_with_parent()
