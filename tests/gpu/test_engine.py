"""A vLLM engine on CUDA sleeps and wakes in the order of the ledger, gives its memory back, and takes new weights."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.config.generation import Sampling
from megarl.config.schema import ActorConfig, EngineConfig, ModelConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.engine_spec import EngineSpec
from megarl.types.messages import Role, RoleSpec
from tests.helpers.checkpoints import VOCAB_SIZE, load_hf
from tests.helpers.cuda import needs_devices
from tests.helpers.gpu_ranks import sleep_and_wake, update_in_flight
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.gpu, needs_devices(1)]

KV_CACHE_MIB = 256
# Between two implementations in bfloat16; weights of another seed are off by nats.
MEAN_NATS = 0.05


def hf_logprobs(path: Path, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Log-probs of tokens 1… of all sequences, from transformers in float32."""
    model = load_hf(path)
    parts = []
    for sequence in sequences:
        tokens = torch.tensor(sequence)
        with torch.no_grad():
            log_p = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        parts.append(log_p[torch.arange(len(log_p)), tokens[1:]].numpy())
    return np.concatenate(parts)


def test_sleep_sync_wake(gpu_pool: Callable[[int], RankPool], checkpoint: Callable[..., Path]) -> None:
    first, second = checkpoint(dtype="bfloat16", seed=0), checkpoint(dtype="bfloat16", seed=1)
    spec = EngineSpec(
        model_path=str(first),
        dtype="bfloat16",
        seed=0,
        max_model_tokens=128,
        config=EngineConfig(kv_cache_mib=KV_CACHE_MIB, max_num_seqs=8, enforce_eager=True, gpu_memory_utilization=0.6),
        can_sleep=True,
    )
    role = RoleSpec(role=Role.ACTOR, model=ModelConfig(path=str(first)), settings=ActorConfig())
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, VOCAB_SIZE, 48).tolist() for _ in range(4)]
    files = [str(file) for file in second.glob("*.safetensors")]
    (trace,) = gpu_pool(1).run(sleep_and_wake, spec, role, files, sequences)
    assert trace.calls == [
        "sleep",
        "offload actor.grads+optimizer",
        "wake weights",
        "offload actor.params",
        "wake kv_cache",
    ]
    kv_cache = KV_CACHE_MIB << 20
    assert trace.free["load"] - trace.free["awake"] >= kv_cache
    # Asleep or taking weights, the cache is not there.
    assert trace.free["sync"] - trace.free["generate"] >= kv_cache
    before, after = np.concatenate(trace.before), np.concatenate(trace.after)
    assert np.abs(before - hf_logprobs(first, sequences)).mean() < MEAN_NATS
    assert np.abs(after - hf_logprobs(second, sequences)).mean() < MEAN_NATS
    assert np.abs(after - before).mean() > 10 * MEAN_NATS


# Graphs are captured for at most 8 sequences; a first start also compiles.
COLD_START_S = 300.0
NUM_TOKENS = 480


def test_an_update_in_flight_with_graphs(gpu_pool: Callable[[int], RankPool], checkpoint: Callable[..., Path]) -> None:
    """Every token has the log-prob of the one version that it names, in an engine process of its own, with graphs."""
    first, second = checkpoint(dtype="bfloat16", seed=0), checkpoint(dtype="bfloat16", seed=1)
    spec = EngineSpec(
        model_path=str(first),
        dtype="bfloat16",
        seed=0,
        max_model_tokens=NUM_TOKENS + 16,
        config=EngineConfig(kv_cache_mib=KV_CACHE_MIB, max_num_seqs=8, enforce_eager=False, gpu_memory_utilization=0.6),
    )
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            token_ids=tuple(rng.integers(3, VOCAB_SIZE, 8).tolist()),
            seed=i,
            sampling=Sampling(temperature=1.0),
            max_tokens=NUM_TOKENS,
        )
        for i in range(8)
    ]
    files = [str(file) for file in second.glob("*.safetensors")]
    (trace,) = gpu_pool(1).run(update_in_flight, spec, files, requests, timeout_s=2 * COLD_START_S)
    assert trace.start_s < COLD_START_S
    versions = np.concatenate([completion.weight_versions for completion in trace.updated])
    assert set(versions) == {0, 1}
    for completions, paths in ((trace.first, {0: first}), (trace.updated, {0: first, 1: second})):
        for version, path in paths.items():
            apart = []
            for request, completion in zip(requests, completions, strict=True):
                tokens = [*request.token_ids, *completion.token_ids.tolist()]
                expected = hf_logprobs(path, [tokens])[len(request.token_ids) - 1 :]
                apart.append(np.abs(completion.logprobs - expected)[completion.weight_versions == version])
            assert np.concatenate(apart).mean() < MEAN_NATS
