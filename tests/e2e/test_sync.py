"""The weights that the engine generates with are the trainer's, to float32 rounding."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from megarl.cluster.cluster import Cluster
from megarl.cluster.roles import actor_role, engine_spec
from megarl.config.generation import Sampling
from megarl.errors import WeightSyncError
from megarl.rollout.source import Group, SamplingPlan, collect
from megarl.rollout.vllm_source import VllmSource
from megarl.train.export import export_model
from megarl.types import FinishReason, Sample, row_from_sample
from megarl.types.messages import LoadRequest
from megarl.weights.families import read_model_spec
from tests.e2e import engines
from tests.e2e.support import (
    Policy,
    UnattendedEngines,
    both_heads,
    largest_difference,
    mean_difference,
    open_policy,
    random_prompts,
    random_sequences,
    rows_of,
    small_config,
    tied_head,
)
from tests.helpers.expert_checkpoint import make_moe
from tests.helpers.loops import begin_groups
from tests.helpers.rank_pool import RankPool

# float32 rounding of two implementations; wrong or stale weights are off by 1e-2 and more.
NATS = 1e-5
# The engine's name of a layer that holds several checkpoint tensors.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@pytest.fixture
def policy(model: Path, cluster: Cluster) -> Iterator[Policy]:
    """The model of the cluster, loaded anew and pushed."""
    policy = open_policy(cluster, small_config(model, "actor.optimizer.lr=0.003"))
    policy.sync.push(0, verify=True)
    yield policy
    policy.sync.close()


def train(policy: Policy, *, steps: int) -> None:
    """Update on fresh rollouts and push, `steps` times."""
    for step in range(1, steps + 1):
        rollout = policy.rollout(random_prompts([12] * 8, seed=step), step=step)
        policy.update([row_from_sample(sample) for sample in rollout.samples], step=step)
        policy.sync.push(step, verify=True)


@both_heads
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_rollout_has_the_trainers_logprobs(policy: Policy, temperature: float) -> None:
    rollout = policy.rollout(random_prompts(range(4, 20)), temperature=temperature)
    rows = [row_from_sample(sample) for sample in rollout.samples]
    recomputed = policy.logprobs(rows, temperature=temperature)
    sampled = [row.quantities["rollout_logprobs"] for row in rows]
    assert mean_difference(sampled, recomputed) <= NATS


@both_heads
def test_after_updates_the_engine_equals_a_new_one_and_the_trainer(
    policy: Policy, engine_process: RankPool, tmp_path: Path
) -> None:
    sequences = random_sequences(8, 48)
    before = policy.cluster.engines.prompt_logprobs(sequences)
    train(policy, steps=3)
    after = policy.cluster.engines.prompt_logprobs(sequences)
    export_model(policy.cluster.workers, actor_role(policy.config), tmp_path / "export")
    spec = engine_spec(small_config(tmp_path / "export"))
    fresh = engine_process.run(engines.view, spec, sequences)[0].given
    trainer = policy.logprobs(rows_of(sequences))
    assert mean_difference(before, after) > 1e-3
    assert largest_difference(after, fresh) <= NATS
    assert largest_difference(after, trainer) <= NATS


def engine_layer(tensor: str) -> str:
    """How vLLM names the layer of a checkpoint tensor, without the prefix `model.`."""
    layer, name = tensor.removeprefix("model.").removesuffix(".weight").rpartition(".")[::2]
    return f"{layer}.{FUSED.get(name, name)}".removeprefix(".")


@both_heads
@pytest.mark.parametrize("edit", ["missing", pytest.param("renamed", marks=pytest.mark.long)])
def test_weights_without_one_tensor_are_refused_and_the_next_ones_taken(
    model: Path, engine_process: RankPool, edit: str, tmp_path: Path
) -> None:
    """Every tensor of the model in turn."""
    (file,) = map(str, model.glob("*.safetensors"))
    spec, sequences = engine_spec(small_config(model)), random_sequences(2, 16)
    refused = engine_process.run(engines.refuse, spec, file, edit, str(tmp_path), sequences)[0]
    names = load_file(file).keys()
    assert ("lm_head.weight" in names) is not read_model_spec(str(model)).dims.tied
    assert refused.errors.keys() == names
    assert [name for name, error in refused.errors.items() if engine_layer(name) not in error] == []
    assert largest_difference(refused.before, refused.after) == 0


@tied_head
def test_a_bridge_that_lacks_a_tensor_is_not_opened(policy: Policy) -> None:
    name = "model.norm.weight"
    with pytest.raises(WeightSyncError, match=rf"engines need 1 tensors that the trainer does not send: \['{name}'\]"):
        policy.cluster.weight_sync({n: spec for n, spec in policy.specs.items() if n != name})


@tied_head
def test_a_cached_prefix_is_forgotten_with_its_weights(policy: Policy) -> None:
    """`test_moe_reload_equals_a_new_engine` measures what a cache that is kept would do."""
    # Three blocks of 32 tokens, which the engine caches.
    shared = random_sequences(1, 96)[0]
    prompts = [replace(prompt, token_ids=(*shared, *prompt.token_ids)) for prompt in random_prompts([8] * 4)]
    policy.rollout(prompts)
    train(policy, steps=1)
    rows = [row_from_sample(sample) for sample in policy.rollout(prompts, step=2).samples]
    assert mean_difference([row.quantities["rollout_logprobs"] for row in rows], policy.logprobs(rows)) <= NATS


@tied_head
def test_a_sample_does_not_depend_on_its_batch(policy: Policy) -> None:
    prompts = random_prompts(range(4, 16))
    together = policy.rollout(prompts).samples
    alone = [sample for prompt in reversed(prompts) for sample in policy.rollout([prompt]).samples]
    expected = {(s.uid, s.sample_index): s.response_token_ids.tolist() for s in together}
    assert {(s.uid, s.sample_index): s.response_token_ids.tolist() for s in alone} == expected
    # Seeds differ between samples and steps, so tokens do.
    assert len({tuple(tokens) for tokens in expected.values()}) == len(together)
    other_step = policy.rollout(prompts, step=2).samples
    assert not any(s.response_token_ids.tolist() == expected[s.uid, s.sample_index] for s in other_step)


@tied_head
def test_every_token_names_the_weights_that_chose_it(policy: Policy) -> None:
    for version in (3, 4):
        policy.sync.push(version, verify=False)
        for sample in policy.rollout(random_prompts([8] * 2)).samples:
            prompt, response = sample.segments
            assert prompt.weight_versions.tolist() == [-1] * 8
            assert response.weight_versions.tolist() == [version] * len(sample.response_token_ids)


@tied_head
def test_requests_in_flight_go_on_by_the_new_weights(policy: Policy) -> None:
    """Tokens before the switch are the old weights', those after it the new ones', on all tokens before them."""
    prompts = random_prompts([8] * 32)
    policy.update([row_from_sample(sample) for sample in policy.rollout(prompts).samples], step=1)

    def push(*_: object) -> None:
        """When the first sample has ended, the others are under way."""
        policy.sync.push(1, verify=False)

    samples = policy.rollout(prompts, max_tokens=176, step=2, at_first=push).samples
    versions = [sample.segments[1].weight_versions for sample in samples]
    assert all(np.isin(v, [0, 1]).all() and (np.diff(v) >= 0).all() for v in versions)
    assert any(v[0] == 0 and v[-1] == 1 for v in versions)
    rows = [row_from_sample(sample) for sample in samples]
    sampled = [row.quantities["rollout_logprobs"] for row in rows]
    new = policy.logprobs(rows)
    policy.cluster.workers.load(LoadRequest(roles=(actor_role(policy.config),), seed=0))
    old = policy.logprobs(rows)
    for version, own, other in ((0, old, new), (1, new, old)):
        of_version = [np.flatnonzero(v == version) for v in versions]
        tokens, owned, others = ([a[i] for a, i in zip(x, of_version, strict=True)] for x in (sampled, own, other))
        assert largest_difference(tokens, owned) <= NATS
        assert mean_difference(tokens, others) > 1e-3


@tied_head
def test_unfinished_samples_are_looked_at_and_go_on(policy: Policy) -> None:
    """What they have so far is the beginning of what they end as, to the bit; and it can be gone on with elsewhere."""
    seen: list[Sample] = []

    def look(source: VllmSource, groups: Sequence[Group]) -> None:
        seen.extend(source.parts(groups))

    prompts = random_prompts([8] * 12)
    rollout = policy.rollout(prompts, max_tokens=176, step=3, at_first=look)
    whole = {(sample.uid, sample.sample_index): sample for sample in rollout.samples}
    assert len(seen) > 12
    assert {part.finish_reason for part in seen} == {FinishReason.ABORT}
    for part in seen:
        tokens, logprobs, end = part.response_token_ids, part.rollout_logprobs, whole[part.uid, part.sample_index]
        assert 0 < len(tokens) < 176
        assert np.array_equal(tokens, end.response_token_ids[: len(tokens)])
        assert np.array_equal(logprobs, end.rollout_logprobs[: len(tokens)])
    finished = [
        sample
        for sample in rollout.samples
        if all((sample.uid, sample.sample_index) != (p.uid, p.sample_index) for p in seen)
    ]
    plan = SamplingPlan(step=3, num_samples=4, sampling=Sampling(temperature=1.0), max_response_tokens=176, run_seed=0)
    source = VllmSource(engines := UnattendedEngines(policy.cluster.engines))
    groups = begin_groups(source, prompts, plan, begun=[*seen, *finished])
    resumed = collect(engines.wait, groups, timeout_s=60.0).samples
    parts = {(part.uid, part.sample_index): part for part in seen}
    for sample in resumed:
        if part := parts.get((sample.uid, sample.sample_index)):
            first, second = sample.segments[1:]
            assert np.array_equal(first.token_ids, part.response_token_ids)
            assert len(first.token_ids) + len(second.token_ids) <= 176
    rows = [row_from_sample(sample) for sample in resumed]
    sampled = [row.quantities["rollout_logprobs"] for row in rows]
    assert largest_difference(sampled, policy.logprobs(rows)) <= NATS


@tied_head
def test_finish_reasons(policy: Policy) -> None:
    """A sample ends with the stop token, which is part of it, or at the limit."""
    limit, stop = 48, policy.spec.hf_config["eos_token_id"]
    samples = policy.rollout(random_prompts([8] * 16), max_tokens=limit).samples
    assert {sample.finish_reason for sample in samples} == {FinishReason.STOP, FinishReason.LENGTH}
    for sample in samples:
        *body, last = sample.response_token_ids.tolist()
        assert stop not in body
        assert (last == stop) is (sample.finish_reason is FinishReason.STOP)
        assert len(body) + 1 == limit or sample.finish_reason is FinishReason.STOP


def test_moe_reload_equals_a_new_engine(engine_process: RankPool, tmp_path: Path) -> None:
    """vLLM's CPU kernels read packed copies of the experts' weights, which a reload alone leaves as they were."""
    # Two blocks of 32 tokens and more, so that generation reads the prefix cache.
    sequences = random_sequences(4, 80)
    old, new = (engine_spec(small_config(make_moe(tmp_path / f"seed{s}", seed=s))) for s in (0, 1))
    files = [str(file) for file in sorted((tmp_path / "seed1").glob("*.safetensors"))]
    reload = engine_process.run(engines.reload, old, files, sequences)[0]
    fresh = engine_process.run(engines.view, new, sequences)[0]
    assert mean_difference(reload.before.given, fresh.given) > 0.1
    # Four prompts are computed whole for their log-probs, and found in the cache up to a whole block afterwards.
    assert (reload.work.prompt_tokens, reload.work.cached_tokens) == (2 * 4 * 80, 4 * 64)
    assert largest_difference(reload.after.given, fresh.given) <= NATS
    assert largest_difference(reload.after.generated, fresh.generated) <= NATS
    # What a sync that keeps the prefix cache would give.
    assert mean_difference(reload.stale_cache, fresh.generated) > 0.1
