"""Open each command of supervised training: read and check its inputs, and make the task that its trainer runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megarl.config.schema import Config
from megarl.record.checkpoints import Command
from megarl.train.rehearsal import rehearse
from megarl.train.supervised import SupervisedTask, sft_task, train_preference_task, train_reward_task
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


def _opened(
    inputs: SupervisedInputs[Data], make_task: Callable[[SupervisedInputs[Data]], SupervisedTask]
) -> OpenedTask:
    return OpenedTask(inputs=inputs, task=make_task(inputs))


# How each supervised command reads and checks its inputs, and makes its task.
SUPERVISED: Mapping[Command, Callable[[Config], OpenedTask]] = {
    "sft": lambda config: _opened(open_sft_inputs(rehearse(config)), sft_task),
    "train-reward": lambda config: _opened(open_train_reward_inputs(rehearse(config)), train_reward_task),
    "train-preference": lambda config: _opened(open_train_preference_inputs(rehearse(config)), train_preference_task),
}
