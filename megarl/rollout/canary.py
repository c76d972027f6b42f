"""Choose what the canary asks engines, and let engines, which call the other functions, tell what they hold."""

import itertools
from collections.abc import Iterable, Sequence

from megarl.config.generation import Sampling
from megarl.rollout.engine import GenerationRequest, VllmEngine
from megarl.types import Prompt

# A round asks each engine this many prompts for this many tokens each.
NUM_PROMPTS, NUM_TOKENS = 4, 16


def canary_requests(prompts: Iterable[Prompt], *, block: int, room: int, temperature: float) -> list[GenerationRequest]:
    """Choose the canary's requests: the first prompts of a run, each with those after it, for more than two blocks.

    block: the tokens of a block of the prefix cache. room: the tokens of the longest sequence. A prompt with images
    stays as it is. Answers are drawn from the whole vocabulary, as the trainer's log-probs are.
    """
    known = list(prompts)
    length, chosen = min(2 * block + 1, max(1, room - NUM_TOKENS)), []
    for i, prompt in enumerate(known[:NUM_PROMPTS]):
        ids = list(prompt.token_ids)
        texts = (each.token_ids for each in (*known[i + 1 :], *known[: i + 1]) if not each.images)
        following = list(itertools.chain.from_iterable(texts))
        while not prompt.images and following and len(ids) < length:
            ids += following
        ids = ids if prompt.images else ids[:length]
        if 0 < len(ids) < room:
            request = GenerationRequest(
                token_ids=tuple(ids),
                seed=i,
                sampling=Sampling(temperature=temperature),
                max_tokens=min(NUM_TOKENS, room - len(ids)),
                images=prompt.images,
                whose=f"canary {i}",
                # Whatever a cache has of it, it was asked for by this request, earlier.
                cache_salt=f"canary {i}",
            )
            chosen.append(request)
    return chosen


def block_tokens(engine: VllmEngine) -> int:
    """Return how many tokens' keys and values a block of an engine's prefix cache holds."""
    size: int = engine.llm.llm_engine.vllm_config.cache_config.block_size
    return size


def held_digests(engine: VllmEngine) -> Sequence[dict[str, int]]:
    """Return, for each worker of an engine, checksums of the weights that it computes with."""
    sums: Sequence[dict[str, int]] = engine.llm.collective_rpc("held_digests")
    return sums
