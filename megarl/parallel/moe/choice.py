"""Which experts see a token, chosen in place of Megatron's top-k routing."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """A router's choice; scores stay the router's.

    Where experts lie in groups, a group is rated by the sum of its `group_rating` best scores: 1 in DeepSeek-V2
    (arXiv:2405.04434), 2 in DeepSeek-V3 (arXiv:2412.19437), while Megatron takes k / (groups of a token).

    forced: indices [T, k], where a token with -1 chooses freely; None: all do.
    """

    group_rating: int
    forced: torch.Tensor | None

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: _TopK
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores [T, k] of the experts of every token, and these; what Megatron's top-k routing asks for."""
        rated = scores
        if num_groups is not None and group_topk is not None:
            rated = scores.masked_fill(~self._in_best_groups(scores, num_groups, group_topk), -torch.inf)
        _, indices = choose(rated, topk)
        if self.forced is not None:
            indices = torch.where(self.forced < 0, indices, self.forced)
        return scores.gather(1, indices), indices

    def _in_best_groups(self, scores: torch.Tensor, num_groups: int, groups_per_token: int) -> torch.Tensor:
        """[T, E] bool: whether an expert is in one of a token's best groups."""
        ratings = scores.unflatten(1, (num_groups, -1)).topk(self.group_rating, dim=-1).values.sum(-1)
        best = ratings.topk(groups_per_token, dim=-1).indices
        chosen = torch.zeros_like(ratings, dtype=torch.bool).scatter_(1, best, value=True)
        return chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)
