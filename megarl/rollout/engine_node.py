"""Start the workers of a vLLM engine on a further one of its nodes."""

import os

from megarl.host.stage import tell_stage
from megarl.rollout.engine_spec import EngineSpec, engine_arguments
from megarl.rollout.prepare import prepare_vllm


class EngineNodeWorkers:
    """The workers of an engine on a further one of its nodes; the `VllmEngine` on the first tells them what to do."""

    def __init__(self, spec: EngineSpec) -> None:
        prepare_vllm(spec)
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        # Defaults depend on the usage, and have to be those of the first node's engine.
        arguments = EngineArgs(**engine_arguments(spec))
        config = arguments.create_engine_config(usage_context=UsageContext.LLM_CLASS, headless=True)
        self._executor = MultiprocExecutor(config, monitor_workers=False)
        tell_stage("")

    def process_ids(self) -> list[int]:
        """Return the ids of this process and of its workers."""
        return [os.getpid(), *(worker.proc.pid for worker in self._executor.workers)]

    def close(self) -> None:
        """Stop the workers."""
        self._executor.shutdown()
