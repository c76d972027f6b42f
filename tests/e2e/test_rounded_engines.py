"""Engines that round weights or keys and values to float8."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.cluster.cluster import Cluster
from megarl.cluster.roles import actor_role, engine_spec
from megarl.rollout.prepare import has_float8_keys
from megarl.train.export import export_adapters, export_model
from megarl.types import FloatArray, row_from_sample
from megarl.weights.peft_files import ADAPTER_FILE, PREFIX
from tests.e2e import engines
from tests.e2e.support import (
    largest_difference,
    mean_difference,
    open_policy,
    random_prompts,
    random_sequences,
    small_config,
)
from tests.helpers.checkpoints import load_hf, make_checkpoint
from tests.helpers.rank_pool import RankError, RankPool

# float32 rounding of two implementations.
NATS = 1e-4
CORRECTED = "algo.correction.name=tis_upper"


def float8(weight: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    scale = largest / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def rounded_logprobs(
    model: Path, scheme: str, sequences: list[list[int]], updates: Mapping[str, torch.Tensor] | None = None
) -> list[FloatArray]:
    """Log-probs by transformers after rounding each layer's matrices; vLLM joins q, k, v and gate, up before.

    updates: what is then added to the matrices of these names.
    """
    hf = load_hf(model)
    with torch.no_grad():
        for layer in hf.model.layers:
            mlp, attention = layer.mlp, layer.self_attn
            for joined in (
                (attention.q_proj, attention.k_proj, attention.v_proj),
                (attention.o_proj,),
                (mlp.gate_proj, mlp.up_proj),
                (mlp.down_proj,),
            ):
                largest = max(part.weight.abs().max() for part in joined)
                for part in joined:
                    rows = part.weight.abs().amax(1, keepdim=True)
                    part.weight.copy_(float8(part.weight, largest if scheme == "fp8_per_tensor" else rows))
        for name, update in (updates or {}).items():
            hf.get_parameter(name).add_(update)
        ids = torch.tensor(sequences)
        logprobs = hf(ids).logits[:, :-1].float().log_softmax(-1)
        return list(logprobs.gather(2, ids[:, 1:, None])[..., 0].numpy())


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", pytest.param("fp8_per_channel", marks=pytest.mark.long)])
def test_weights_are_rounded_at_the_start_and_by_every_reload(
    scheme: str, engine_process: RankPool, tmp_path: Path
) -> None:
    models = [make_checkpoint(tmp_path / f"seed{seed}", tied=True, seed=seed) for seed in (0, 1)]
    files, sequences = [str(file) for file in models[1].glob("*.safetensors")], random_sequences(4, 40)
    spec = engine_spec(small_config(models[0], f"rollout.engine.quantization={scheme}", CORRECTED))
    got = engine_process.run(engines.reload, spec, files, sequences)[0]
    for model, given in zip(models, (got.before.given, got.after.given), strict=True):
        assert largest_difference(given, rounded_logprobs(model, scheme, sequences)) <= NATS
        (other,) = {"fp8_per_tensor", "fp8_per_channel"} - {scheme}
        assert mean_difference(given, rounded_logprobs(model, other, sequences)) > 1e-3


def test_keys_and_values_in_float8(engine_process: RankPool, tmp_path: Path) -> None:
    model, sequences = make_checkpoint(tmp_path / "model", tied=True), random_sequences(4, 40)
    exact = engine_process.run(engines.view, engine_spec(small_config(model)), sequences)[0]
    spec = engine_spec(small_config(model, "rollout.engine.kv_cache_dtype=fp8_e4m3", CORRECTED))
    if not has_float8_keys():
        with pytest.raises(RankError, match=r"kv_cache_dtype: got fp8_e4m3, but .* CPU with AVX-512 or AMX"):
            engine_process.run(engines.view, spec, sequences)
        return
    rounded = engine_process.run(engines.view, spec, sequences)[0]
    assert 1e-3 < mean_difference(exact.given, rounded.given) < 0.5


@pytest.mark.long
def test_a_sync_rounds_as_one_worker_would(tmp_path: Path) -> None:
    """Two tensor-parallel workers agree on the scale of each matrix."""
    model, sequences = make_checkpoint(tmp_path / "model", tied=True), random_sequences(4, 40)
    config = small_config(
        model,
        "rollout.engine.tp=2",
        "rollout.engine.quantization=fp8_per_tensor",
        CORRECTED,
        "actor.optimizer.lr=0.003",
    )
    with Cluster(config) as cluster:
        policy = open_policy(cluster, config)
        policy.sync.push(0, verify=True)
        rows = [row_from_sample(sample) for sample in policy.rollout(random_prompts([12] * 4)).samples]
        policy.update(rows, step=1)
        policy.sync.push(1, verify=True)
        given = cluster.engines.prompt_logprobs(sequences)
        export_model(cluster.workers, actor_role(config), tmp_path / "export")
        policy.sync.close()
    assert largest_difference(given, rounded_logprobs(tmp_path / "export", "fp8_per_tensor", sequences)) <= NATS
    assert np.isfinite(given).all()


@pytest.mark.long
def test_adapters_are_added_to_rounded_weights_as_they_are(tmp_path: Path) -> None:
    model, sequences = make_checkpoint(tmp_path / "model", tied=True), random_sequences(4, 40)
    settings = ("rollout.engine.quantization=fp8_per_channel", CORRECTED, "actor.optimizer.lr=0.01")
    config = small_config(model, "actor.lora={rank: 4, alpha: 16, sync: adapter}", *settings)
    with Cluster(config) as cluster:
        policy = open_policy(cluster, config)
        policy.sync.push(0, verify=True)
        rows = [row_from_sample(sample) for sample in policy.rollout(random_prompts([12] * 4)).samples]
        policy.update(rows, step=1)
        policy.update(rows, step=2)
        policy.sync.push(1, verify=True)
        given = cluster.engines.prompt_logprobs(sequences)
        export_adapters(cluster.workers, actor_role(config), tmp_path / "adapters")
        policy.sync.close()
    adapters = load_file(tmp_path / "adapters" / ADAPTER_FILE)
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in adapters}
    pairs = {m: [adapters[f"{PREFIX}{m}.lora_{letter}.weight"] for letter in "BA"] for m in modules}
    updates = {f"{module}.weight": 16 / 4 * b @ a for module, (b, a) in pairs.items()}
    expected = rounded_logprobs(model, "fp8_per_channel", sequences, updates)
    assert largest_difference(given, expected) <= NATS
    assert mean_difference(given, rounded_logprobs(model, "fp8_per_channel", sequences)) > 1e-3
