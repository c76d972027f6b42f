"""What a rank's process does to build a pipeline stage as vLLM does, without an engine."""

import os
from collections.abc import Sequence

import torch

from tests.helpers.rank_pool import RankContext


def stage_tensors(context: RankContext, paths: Sequence[str]) -> list[list[str]]:
    """The names of the parameters that this rank's stage of each model has; nothing reads weights."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    # vLLM's workers set it, and name shared memory by it.
    os.environ["VLLM_DIST_IDENT"] = os.path.basename(context.directory)
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
        with set_current_vllm_config(config):
            if not names:
                init_distributed_environment(
                    context.world_size, context.rank, f"file://{context.directory}/stages", context.rank, "gloo"
                )
            # Anew for each model: those with experts have groups that the others lack.
            initialize_model_parallel(1, context.world_size)
            with torch.device("meta"):
                model = initialize_model(config)
            names.append([name for name, _ in model.named_parameters()])
            destroy_model_parallel()
    return names
