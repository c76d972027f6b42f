"""Drafted tokens change neither what is sampled nor its log-probs, which are the model's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.cluster.roles import engine_spec
from megarl.config.generation import Sampling
from megarl.rollout.engine import Completion, GenerationRequest
from tests.e2e import engines
from tests.e2e.support import random_sequences, small_config
from tests.helpers.checkpoints import load_hf, make_checkpoint
from tests.helpers.rank_pool import RankPool

NGRAM = (
    "rollout.engine.speculation.method=ngram",
    "rollout.engine.speculation.num_tokens=4",
    "rollout.engine.speculation.min_ngram_tokens=1",
)
# float32 rounding of two implementations; temperatures multiply it.
NATS = 1e-4


def requests(temperature: float, *, top_k: int = -1, num: int = 4, num_tokens: int = 32) -> list[GenerationRequest]:
    """Prompts that repeat themselves, so that there is something to draft from the first step on."""
    prompts = [tuple(s + s[:6]) for s in random_sequences(num, 12)]
    return [
        GenerationRequest(
            token_ids=prompt,
            seed=seed,
            sampling=Sampling(temperature=temperature, top_k=top_k),
            max_tokens=num_tokens,
            with_nucleus=top_k > 0,
        )
        for seed, prompt in enumerate(prompts)
    ]


def reference(model: Path, asked: Sequence[GenerationRequest], completions: Sequence[Completion]) -> list[torch.Tensor]:
    """Log-probs of the whole vocabulary before each completed token, by transformers, [n, V] for each request."""
    hf, found = load_hf(model), []
    for request, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = hf(ids).logits[0, len(request.token_ids) - 1 : -1].float()
        found.append((logits / (request.sampling.temperature or 1.0)).log_softmax(-1))
    return found


def chosen(logprobs: torch.Tensor, completion: Completion) -> np.ndarray:
    return logprobs.gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0].numpy()


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of `tests.e2e.engines` in a process of its own: after n-grams, vLLM starts no other engine."""
    with RankPool(1, timeout_s=240.0) as pool:
        return pool.run(function, *arguments)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Requests with their completions as one batch and alone, and the decode steps that the latter took."""

    model: Path
    asked: list[GenerationRequest]
    together: list[Completion]
    alone: list[Completion]
    steps_alone: list[int]

    def of(self, *temperatures: float, top_k: int = -1) -> "Answered":
        """Those of some temperatures."""
        asked = [request.sampling for request in self.asked]
        kept = [i for i, each in enumerate(asked) if each.temperature in temperatures and each.top_k == top_k]
        parts = {name: [getattr(self, name)[i] for i in kept] for name in ("asked", "together", "alone", "steps_alone")}
        return Answered(model=self.model, **parts)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """Of one engine, in one batch."""
    model = make_checkpoint(tmp_path_factory.mktemp("drafts") / "model", tied=True)
    asked = [*requests(1.0), *requests(0.5), *requests(0.1), *requests(0.0), *requests(0.5, top_k=5)]
    spec = engine_spec(small_config(model, "rollout.top_k=5", *NGRAM))
    out = run_alone(engines.generate, spec, asked)
    return Answered(model=model, asked=asked, together=out.together, alone=out.alone, steps_alone=out.steps_alone)


def test_drafts_are_accepted(answered: Answered) -> None:
    """With none, a request of n tokens takes n steps; a random model seldom repeats itself."""
    likely = answered.of(0.0, 0.1)
    assert sum(len(each.token_ids) for each in likely.alone) - sum(likely.steps_alone) >= 8


def test_a_sample_does_not_depend_on_its_batch(answered: Answered) -> None:
    for together, alone in zip(answered.together, answered.alone, strict=True):
        assert np.array_equal(together.token_ids, alone.token_ids)


def test_samples_and_logprobs_are_the_models(answered: Answered) -> None:
    """At three temperatures; the sum of log-probs is compared with its expectation under the model."""
    some, difference, variance = answered.of(1.0, 0.5, 0.1), 0.0, 0.0
    for whole, completion in zip(reference(some.model, some.asked, some.together), some.together, strict=True):
        expected = chosen(whole, completion)
        assert np.abs(completion.logprobs - expected).max() <= NATS
        mean = (whole.exp() * whole).sum(-1)
        difference += float(expected.sum() - mean.sum())
        variance += float(((whole.exp() * whole**2).sum(-1) - mean**2).sum())
    # Four standard deviations: one of 16 000 right samples would be that far off, and seeds are fixed.
    assert abs(difference) <= 4 * variance**0.5


def test_greedy_tokens_are_those_without_drafts(answered: Answered) -> None:
    greedy = answered.of(0.0)
    for whole, completion in zip(reference(greedy.model, greedy.asked, greedy.together), greedy.together, strict=True):
        assert np.array_equal(completion.token_ids, whole.argmax(-1).numpy())


def test_truncated_sampling_knows_what_was_left_to_sample_from(answered: Answered) -> None:
    some = answered.of(0.5, top_k=5)
    for whole, completion in zip(reference(some.model, some.asked, some.together), some.together, strict=True):
        assert completion.nucleus is not None
        best = whole.topk(5)
        left = [set(row[row >= 0].tolist()) for row in completion.nucleus]
        assert left == [set(row.tolist()) for row in best.indices]
        expected = chosen(whole, completion) - best.values.logsumexp(-1).numpy()
        assert np.abs(completion.logprobs - expected).max() <= NATS


@pytest.mark.long
def test_drafts_survive_new_weights(tmp_path: Path) -> None:
    """Tokens before the switch are the old weights', those after it the new ones', on all tokens before them."""
    models = [make_checkpoint(tmp_path / f"seed{seed}", tied=True, seed=seed) for seed in (0, 1)]
    asked = [*requests(1.0, num=1, num_tokens=12), *requests(0.5, num=4, num_tokens=64)]
    files = [str(file) for file in models[1].glob("*.safetensors")]
    spec = engine_spec(small_config(models[0], *NGRAM))
    updated = run_alone(engines.update_in_flight, spec, files, asked)
    check_switch(models, asked, updated.completions)


def check_switch(models: Sequence[Path], asked: Sequence[GenerationRequest], done: Sequence[Completion]) -> None:
    """Compare the log-probs of each version's tokens with those of its model."""
    by_version = [reference(model, asked, done) for model in models]
    assert {int(v) for completion in done for v in completion.weight_versions} == {0, 1}
    for i, completion in enumerate(done):
        assert (np.diff(completion.weight_versions) >= 0).all()
        expected = [chosen(version[i], completion) for version in by_version]
        of = np.where(completion.weight_versions == 0, expected[0], expected[1])
        assert np.abs(completion.logprobs - of).max() <= NATS
