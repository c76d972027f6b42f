"""Open each command of supervised training: read and check its inputs, and make the task that its trainer runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.config.schema import Config
from megarl.train.checkpoint import Command
from megarl.train.preference import train_preference_task
from megarl.train.supervised import SupervisedTask, sft_task, train_reward_task
from megarl.train.supervised_inputs import (
    Data,
    Examples,
    SupervisedInputs,
    open_sft_inputs,
    open_train_preference_inputs,
    open_train_reward_inputs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTask:
    """A supervised run that has passed all checks and needs only a cluster."""

    inputs: SupervisedInputs[Examples]
    task: SupervisedTask


def _opener(
    open_inputs: Callable[[Config], SupervisedInputs[Data]],
    make_task: Callable[[SupervisedInputs[Data]], SupervisedTask],
) -> Callable[[Config], OpenedTask]:
    def opened(config: Config) -> OpenedTask:
        inputs = open_inputs(config)
        return OpenedTask(inputs=inputs, task=make_task(inputs))

    return opened


# How each supervised command reads and checks its inputs, and makes its task.
SUPERVISED: Mapping[Command, Callable[[Config], OpenedTask]] = {
    "sft": _opener(open_sft_inputs, sft_task),
    "train-reward": _opener(open_train_reward_inputs, train_reward_task),
    "train-preference": _opener(open_train_preference_inputs, train_preference_task),
}
