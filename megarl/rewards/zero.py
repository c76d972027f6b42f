"""Judge nothing: the reward of every sample is 0, for algorithms that read no rewards."""

from collections.abc import Sequence

from megarl.rewards.judge import Gathered, Judged
from megarl.types import Reward


class NoJudge:
    """A judge that gives every sample the reward 0; a data source's scorer still decides what is correct."""

    def begin(self) -> Gathered:
        return Gathered()

    def finish(self, sessions: Sequence[Gathered]) -> Judged:
        return Judged(rewards=[Reward(score=0.0, correct=False) for session in sessions for _ in session.items])

    def close(self) -> None:
        """Do nothing: there is nothing to end."""
