"""The workers of an engine on a node after its first, as vLLM's ``run_headless`` starts them."""

from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from verl_rc.runtime.rollout.engine import FurtherPart
from verl_rc.runtime.rollout.vllm.llm import engine_arguments
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.rollout.vllm.sampler import sampler_arguments


class FurtherNode(FurtherPart):
    """Workers that take their orders from the first node; they are children of this process."""

    def __init__(self, options: VllmOptions) -> None:
        """Start the workers; returns when they have loaded the model and joined those of all nodes."""
        arguments = engine_arguments(options, **sampler_arguments(options))
        config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS, headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    def serve(self) -> None:
        """See ``FurtherPart``. It is over when a worker has died."""
        self._executor.start_worker_monitor(inline=True)
