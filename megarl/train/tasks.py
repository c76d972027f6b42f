"""Open each command of supervised training: read and check its inputs, and make the task that its trainer runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.config.schema import Config
from megarl.train.checkpoint import Command
from megarl.train.preference import train_preference_task
from megarl.train.supervised import SupervisedTask, sft_task, train_reward_task
from megarl.train.supervised_inputs import open_sft_inputs, open_train_preference_inputs, open_train_reward_inputs
from megarl.types import Row


class Examples(Protocol):
    """A data set of supervised training, whose examples are one row each or, as preference pairs, two.

    num_dropped: how many examples of the files were left out because they are over a length limit.
    """

    num_dropped: int

    def __len__(self) -> int:
        """Return the number of examples."""

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows of the examples with these indices."""


class Inputs(Protocol):
    """The checked inputs of a supervised command, with what a user should know about them."""

    @property
    def config(self) -> Config:
        """Return the configuration, in which a length in epochs has become a number of steps."""

    @property
    def train(self) -> Examples:
        """Return the examples to train on."""

    @property
    def val(self) -> Examples | None:
        """Return the held-out examples, if there are any."""

    @property
    def notes(self) -> Sequence[str]:
        """Return facts to print at the start, such as how many steps the epochs are."""

    @property
    def warnings(self) -> Sequence[str]:
        """Return what is most likely not as the user wishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTask:
    """A supervised run that has passed all checks and needs only a cluster."""

    inputs: Inputs
    task: SupervisedTask


def _open_sft(config: Config) -> OpenedTask:
    inputs = open_sft_inputs(config)
    return OpenedTask(inputs=inputs, task=sft_task(inputs))


def _open_train_reward(config: Config) -> OpenedTask:
    inputs = open_train_reward_inputs(config)
    return OpenedTask(inputs=inputs, task=train_reward_task(inputs))


def _open_train_preference(config: Config) -> OpenedTask:
    inputs = open_train_preference_inputs(config)
    return OpenedTask(inputs=inputs, task=train_preference_task(inputs))


# How each supervised command reads and checks its inputs.
SUPERVISED: Mapping[Command, Callable[[Config], OpenedTask]] = {
    "sft": _open_sft,
    "train-reward": _open_train_reward,
    "train-preference": _open_train_preference,
}
