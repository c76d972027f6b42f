"""Judge samples by what their environments said: the reward is the sum of the rewards of all turns."""

from dataclasses import dataclass, field
from typing import Self

from megarl.errors import RunError
from megarl.rewards.judge import FinishedSample, Judged
from megarl.types import Reward


class EnvironmentJudge:
    """A judge that passes on the rewards of environments.

    A sample is correct if its environment's details have a true `correct`, or have none and the reward is positive.
    """

    def begin(self) -> "EnvironmentSession":
        return EnvironmentSession()

    def close(self) -> None:
        """Do nothing: environments belong to the run."""


@dataclass(slots=True)
class EnvironmentSession:
    """The judging of one batch by environments."""

    _items: list[FinishedSample] = field(default_factory=list)

    def add(self, item: FinishedSample) -> None:
        self._items.append(item)

    def is_ready(self) -> bool:
        return True

    def absorb(self, other: Self) -> None:
        self._items += other._items

    def finish(self) -> Judged:
        """Return the rewards. Raises RunError for a sample that had no environment."""
        rewards = []
        for item in self._items:
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
