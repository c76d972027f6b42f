"""Which experts a router chooses: among the best groups, by hand, and where they are forced."""

import pytest
import torch

from megarl.parallel.moe.routing import ExpertChoice

# Three groups of two. Rated by the best, groups come 0, 2, 1; by both together 2, 1, 0.
SCORES = torch.tensor([[0.50, 0.01, 0.24, 0.30, 0.40, 0.35]])


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = scores.topk(k, dim=1)
    return values, indices


def chosen(choice: ExpertChoice, k: int, groups: tuple[int, int] | None) -> tuple[list[float], list[int]]:
    num_groups, per_token = groups or (None, None)
    # Megatron's choice takes groups too, and is not asked for them.
    scores, indices = choice.get_replay_topk(SCORES, k, num_groups, per_token, top_k)
    return scores[0].tolist(), indices[0].tolist()


@pytest.mark.parametrize(
    ("group_rating", "groups", "expected"),
    [
        (1, None, [0, 4, 5]),
        # DeepSeek-V2: groups 0 and 2; then V3: 2 and 1, without the best expert of all.
        (1, (3, 2), [0, 4, 5]),
        (2, (3, 2), [4, 5, 3]),
        (1, (3, 1), [0, 1]),
        (2, (3, 1), [4, 5]),
    ],
)
def test_groups_are_rated_by_their_best(group_rating: int, groups: tuple[int, int] | None, expected: list[int]) -> None:
    scores, indices = chosen(ExpertChoice(group_rating=group_rating, forced=None), len(expected), groups)
    assert indices == expected
    assert scores == SCORES[0, expected].tolist()


def test_forced_experts_have_their_own_scores() -> None:
    """Also outside the best groups; a token with -1 chooses freely."""
    scores, forced = SCORES.expand(2, -1), torch.tensor([[2, 1], [-1, -1]])
    choice = ExpertChoice(group_rating=2, forced=forced)
    weights, indices = choice.get_replay_topk(scores, 2, 3, 1, top_k)
    assert indices.tolist() == [[2, 1], [4, 5]]
    assert torch.equal(weights, scores.gather(1, indices))


def test_scores_keep_their_gradient() -> None:
    scores = SCORES.clone().requires_grad_()
    weights, _ = ExpertChoice(group_rating=2, forced=None).get_replay_topk(scores, 2, 3, 1, top_k)
    weights.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 0, 0, 0, 1, 1]]
