"""Judge samples by what their environments said, namely the sum of the rewards of all turns, or by nothing."""

from collections.abc import Sequence

from megarl.errors import RunError
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


class EnvironmentJudge:
    """A judge that passes on the rewards of environments.

    A sample is correct if its environment's details have a true `correct`, or have none and the reward is positive.
    """

    def begin(self) -> Gathered:
        return Gathered()

    def finish(self, sessions: Sequence[Gathered]) -> Judged:
        """Return the rewards. Raises RunError for a sample that had no environment."""
        rewards = []
        for item in (item for session in sessions for item in session.items):
            if (episode := item.sample.episode) is None:
                raise RunError(
                    f"sample {item.label} has no environment that could reward it; name one in the data's column "
                    "environment.key, set environment.default, or route its data source to another part of "
                    "rewards.hybrid"
                )
            total = sum(segment.reward for segment in item.sample.segments)
            correct = bool(episode.details.get("correct", total > 0))
            rewards.append(Reward(score=total, correct=correct))
        return Judged(rewards=rewards)

    def close(self) -> None:
        """Do nothing: environments belong to the run."""
