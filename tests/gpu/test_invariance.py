"""With batch-invariant kernels, log-probs have the same bits whatever else engine and trainer compute with them.

Each test has a process of its own: the kernels stay in place until it ends.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from megarl.config.generation import Sampling
from megarl.config.schema import ActorConfig, EngineConfig, ModelConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.engine_spec import EngineSpec
from tests.helpers.checkpoints import VOCAB_SIZE
from tests.helpers.cuda import needs_devices
from tests.helpers.gpu_ranks import alone_and_together, logprobs_alone_and_together
from tests.helpers.rank_pool import RankPool
from tests.helpers.rows import random_rows

pytestmark = [pytest.mark.gpu, needs_devices(1)]


def test_engine(checkpoint: Callable[..., Path]) -> None:
    spec = EngineSpec(
        model_path=str(checkpoint(dtype="bfloat16", seed=0)),
        dtype="bfloat16",
        seed=0,
        max_model_tokens=256,
        config=EngineConfig(kv_cache_mib=256, max_num_seqs=32, prefix_caching=False, gpu_memory_utilization=0.6),
        batch_invariant=True,
    )
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            token_ids=tuple(rng.integers(3, VOCAB_SIZE, 5 + 3 * i).tolist()),
            seed=i,
            sampling=Sampling(temperature=1.0),
            max_tokens=48,
        )
        for i in range(24)
    ]
    with RankPool(1, timeout_s=600.0, device="cuda") as pool:
        ((alone, together),) = pool.run(alone_and_together, spec, requests)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.skipif(
    not (find_spec("transformer_engine") and find_spec("flash_attn_3")),
    reason="run.batch_invariant needs Transformer Engine and FlashAttention 3",
)
def test_trainer(checkpoint: Callable[..., Path]) -> None:
    model = ModelConfig(path=str(checkpoint(dtype="bfloat16", seed=0)), dtype="bfloat16")
    rows = random_rows([(5, 12), (3, 20), (9, 7), (40, 150)], holes=False)
    with RankPool(1, timeout_s=300.0, device="cuda") as pool:
        ((alone, together),) = pool.run(logprobs_alone_and_together, ActorConfig(), model, rows)
    assert alone == together
