"""Sample the prompts of a run, and queue them: in the sampler's order, but for those that a step gave back."""

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.generation import ScheduleConfig
from megarl.config.schema import DataConfig, TrainerConfig
from megarl.data.prompts import PromptDataset
from megarl.data.sampler import Sampler, prompt_sampler
from megarl.errors import ConfigError


class PromptQueue:
    """A queue of prompt indices in the sampler's order; indices that were given back come first."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._waiting: list[int] = []

    def take(self, count: int, *, except_for: set[int]) -> list[int]:
        """Take the next `count` indices; those in `except_for` keep their place in the queue."""
        taken: list[int] = []
        passed: list[int] = []
        while len(taken) < count:
            if not self._waiting:
                self._waiting = self._sampler.next_batch()
            index = self._waiting.pop(0)
            (passed if index in except_for or index in taken else taken).append(index)
        self.give_back(passed)
        return taken

    def give_back(self, indices: Sequence[int]) -> None:
        """Put indices back at the front of the queue."""
        # Each once: a mixture draws the rows of a small file again and again while they wait.
        self._waiting = list(dict.fromkeys([*indices, *self._waiting]))

    def state_dict(self) -> dict[str, object]:
        """Return the queue's state for a checkpoint: the sampler's state, and the indices that were given back."""
        return {"sampler": dict(self._sampler.state_dict()), "waiting": list(self._waiting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the queue from what `state_dict` returned."""
        self._sampler.load_state_dict(state["sampler"])
        self._waiting = [int(index) for index in state["waiting"]]


def open_sampler(
    data: DataConfig, trainer: TrainerConfig, schedule: ScheduleConfig, train: PromptDataset, *, seed: int
) -> Sampler:
    """Return the sampler of training prompts; ConfigError if fewer than a batch needs, or are under way."""
    under_way = (schedule.staleness + 1) * trainer.prompts_per_step
    if schedule.staleness and len(train) < under_way:
        raise ConfigError(
            f"data.train: has {len(train)} prompts, expected at least (rollout.schedule.staleness + 1) · "
            f"trainer.prompts_per_step = {under_way}, which are under way at a time; add prompts, or lower one of them"
        )
    sizes, batch_size = train.num_prompts_by_file, trainer.prompts_per_step
    return prompt_sampler(data.train, sizes, batch_size=batch_size, seed=seed, shuffle=data.shuffle)
