"""Supervised warm start: the trainer's models, workers and optimizer steps on demonstrations."""

from megarl.algos.sft import SftAlgorithm
from megarl.cluster.roles import actor_role
from megarl.train.inputs import SftInputs
from megarl.train.supervised import SupervisedTask


def sft_task(inputs: SftInputs) -> SupervisedTask:
    """Training up to step `sft.total_steps`, on `sft.batch_size` demonstrations a step."""
    config = inputs.config
    return SupervisedTask(
        command="sft",
        role=actor_role(config),
        objective=SftAlgorithm(),
        total_steps=config.sft.total_steps,
        batch_size=config.sft.batch_size,
        num_examples=len(inputs.train),
        rows=lambda indices: [inputs.train[i] for i in indices],
    )
