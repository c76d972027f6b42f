"""Steps with every score that some algorithm reads, and what an algorithm makes of one: advantages, then the loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.algos.prefixes import DEMONSTRATION
from megarl.types import Advantages, Algorithm, ScoredBatch
from tests.helpers.objectives import Outcome, Problem, run

VOCAB_SIZE = 50
MAX_RESPONSE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Scored rows, and the current policy's log-probs and entropies of them; float64, 0 outside the loss mask."""

    batch: ScoredBatch
    logprobs: Tensor
    entropy: Tensor

    def with_quantities(self, **quantities: Tensor) -> "Step":
        return replace(self, batch=replace(self.batch, quantities={**self.batch.quantities, **quantities}))

    def without(self, *names: str) -> "Step":
        """The step without some quantities."""
        quantities = {name: value for name, value in self.batch.quantities.items() if name not in names}
        return replace(self, batch=replace(self.batch, quantities=quantities))

    def rows(self, order: Sequence[int]) -> "Step":
        """These rows, in this order."""
        batch, index = self.batch, list(order)
        return Step(
            batch=replace(
                batch,
                uids=tuple(batch.uids[i] for i in index),
                rewards=batch.rewards[index],
                correct=batch.correct[index],
                loss_mask=batch.loss_mask[index],
                quantities={name: value[index] for name, value in batch.quantities.items()},
                truncated=None if batch.truncated is None else batch.truncated[index],
                details={name: value[index] for name, value in batch.details.items()},
            ),
            logprobs=self.logprobs[index],
            entropy=self.entropy[index],
        )

    def columns(self, change: Callable[[Tensor], Tensor]) -> "Step":
        """With every [B, T] tensor changed alike."""
        quantities = {name: change(value) for name, value in self.batch.quantities.items()}
        return Step(
            batch=replace(self.batch, loss_mask=change(self.batch.loss_mask), quantities=quantities),
            logprobs=change(self.logprobs),
            entropy=change(self.entropy),
        )


def random_step(group_sizes: Sequence[int], seed: int, *, demonstrations: bool = False) -> Step:
    """Groups of rows of random lengths with holes, some without a loss token; rewards 0 and 1.

    With `demonstrations` some rows start with one, of which some tokens have the demonstrator's probability.
    """
    g = torch.Generator().manual_seed(seed)
    rows, width = sum(group_sizes), MAX_RESPONSE_TOKENS
    lengths = torch.randint(0, width + 1, (rows, 1), generator=g)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=g) < 0.9)

    def uniform(low: float, high: float) -> Tensor:
        return torch.where(mask, low + (high - low) * torch.rand(rows, width, generator=g, dtype=torch.float64), 0.0)

    def near(values: Tensor, spread: float) -> Tensor:
        noise = spread * torch.randn(rows, width, generator=g, dtype=torch.float64)
        return torch.where(mask, (values + noise).clamp(max=0), 0.0)

    old = uniform(-4, 0)
    quantities = {
        "old_logprobs": old,
        "rollout_logprobs": near(old, 0.5),
        "ref_logprobs": near(old, 0.5),
        "teacher_logprobs": 0.8 * old,
        "old_entropy": uniform(0, math.log(VOCAB_SIZE)),
        "old_squares": uniform(1, 2),
        "hint_logprobs": near(old, 1.5),
        "shuffled_hint_logprobs": near(old, 0.5),
        "hint_kl": uniform(0, 2),
        "values": uniform(-1, 1),
        "engine_tail": torch.where(mask, 0.01, 0.0).double(),
        "cpo_excluded": ((torch.rand(rows, width, generator=g) < 0.2) & mask).double(),
    }
    if demonstrations:
        starts = torch.randint(-width, width + 1, (rows, 1), generator=g)
        quantities[DEMONSTRATION] = ((torch.arange(width) < starts) & mask).double()
        quantities["target_probs"] = torch.where(torch.rand(rows, width, generator=g) < 0.5, uniform(0.01, 1), -1.0)
    rewards = torch.randint(0, 2, (rows,), generator=g).double()
    return Step(
        batch=ScoredBatch(
            uids=tuple(f"q{number}" for number, size in enumerate(group_sizes) for _ in range(size)),
            rewards=rewards,
            correct=rewards > 0,
            loss_mask=mask,
            quantities=quantities,
            truncated=lengths[:, 0] == width,
            step=3,
            seed=11,
            details={"greedy_score": rewards.flip(0)},
        ),
        logprobs=near(old, 0.4),
        entropy=uniform(0, math.log(VOCAB_SIZE)),
    )


def problem_of(algo: Algorithm, step: Step) -> tuple[Problem, Advantages]:
    """What the loss sees of a step: the quantities that it reads, as the trainer sends them."""
    advantages = algo.advantages(step.batch, algo.initial_state())
    quantities = {**step.batch.quantities, "advantages": advantages.values, **advantages.quantities}
    sent = {name: value for name, value in quantities.items() if name in algo.reads}
    return Problem(mask=step.batch.loss_mask, logprobs=step.logprobs, entropy=step.entropy, quantities=sent), advantages


def outcome_of(algo: Algorithm, step: Step, micro_batches: Sequence[Sequence[int]] | None = None) -> Outcome:
    """Loss, gradients and metrics of an optimizer step on the whole step."""
    return run(algo, problem_of(algo, step)[0], micro_batches=micro_batches)
