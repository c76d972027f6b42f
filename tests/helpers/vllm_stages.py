"""What a rank's process does to build a pipeline stage as vLLM does, without an engine."""

from collections.abc import Sequence

import torch

from tests.helpers.rank_pool import RankContext


def stage_tensors(context: RankContext, paths: Sequence[str]) -> list[list[str]]:
    """The names of the parameters that this rank's stage of each model has; nothing reads weights."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    names = list[list[str]]()
    for path in paths:
        arguments = EngineArgs(
            model=path,
            dtype="float32",
            max_model_len=64,
            enforce_eager=True,
            enable_chunked_prefill=False,
            pipeline_parallel_size=context.world_size,
            distributed_executor_backend="mp",
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config), torch.device("meta"):
            if not names:
                init_distributed_environment(
                    context.world_size, context.rank, f"file://{context.directory}/stages", context.rank, "gloo"
                )
                initialize_model_parallel(1, context.world_size)
            names.append([name for name, _ in initialize_model(config).named_parameters()])
    return names
