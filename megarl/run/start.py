"""Start a whole run from a configuration: check everything, start the cluster, train, report."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.schema import Config
from megarl.errors import ConfigError, DataError, RunError, WorkerError
from megarl.launch.status import Heartbeat
from megarl.record.recorder import RunRecorder
from megarl.report import write_report
from megarl.run.resume import find_checkpoint, resume_notes
from megarl.train.checkpoint import Checkpoint
from megarl.train.inputs import open_train_inputs
from megarl.train.preference import train_preference_task
from megarl.train.supervised import SupervisedTask, sft_task, train_reward_task
from megarl.train.supervised_inputs import open_sft_inputs, open_train_preference_inputs, open_train_reward_inputs
from megarl.types.messages import RoleSpec

if TYPE_CHECKING:
    from megarl.cluster import Cluster


def train(config: Config, *, overwrite: bool = False, resume: bool = False) -> RunRecorder:
    """Run reinforcement learning from the first check to the report. Raises RunStopped if a signal ends it early."""
    inputs = open_train_inputs(config)
    config = inputs.config
    checkpoint = find_checkpoint(config, "train") if resume else None
    recorder = _open_recorder(config, checkpoint, overwrite=overwrite or resume)
    for warning in inputs.warnings:
        print(f"warning: {warning}")
    with _heartbeat(recorder, "train"), started_cluster(config, recorder.paths.logs, inputs.roles) as cluster:
        from megarl.train.wiring import build_trainer

        build_trainer(inputs, cluster, recorder).fit(checkpoint)
    write_report(recorder.paths.root)
    return recorder


def sft(config: Config, *, overwrite: bool = False, resume: bool = False) -> RunRecorder:
    """Run supervised fine-tuning from the first check to the report. Raises RunStopped if a signal ends it early."""
    inputs = open_sft_inputs(config)
    for line in (*inputs.notes, *(f"warning: {warning}" for warning in inputs.warnings)):
        print(line)
    recorder = _train_supervised(sft_task(inputs), inputs.config, overwrite=overwrite, resume=resume)
    write_report(recorder.paths.root)
    return recorder


def train_reward(config: Config, *, overwrite: bool = False, resume: bool = False) -> RunRecorder:
    """Train a reward model, from checks to report. Raises RunStopped if a signal ends it early."""
    inputs = open_train_reward_inputs(config)
    for note in inputs.notes:
        print(note)
    recorder = _train_supervised(train_reward_task(inputs), inputs.config, overwrite=overwrite, resume=resume)
    write_report(recorder.paths.root)
    return recorder


def train_preference(config: Config, *, overwrite: bool = False, resume: bool = False) -> RunRecorder:
    """Train a policy on preference pairs, from checks to report. Raises RunStopped if a signal ends it early."""
    inputs = open_train_preference_inputs(config)
    for note in inputs.notes:
        print(note)
    task = train_preference_task(inputs)
    recorder = _train_supervised(task, inputs.config, overwrite=overwrite, resume=resume)
    write_report(recorder.paths.root)
    return recorder


def _train_supervised(task: SupervisedTask, config: Config, *, overwrite: bool, resume: bool) -> RunRecorder:
    checkpoint = find_checkpoint(config, task.command) if resume else None
    recorder = _open_recorder(config, checkpoint, overwrite=overwrite or resume)
    with (
        _heartbeat(recorder, task.command),
        started_cluster(config, recorder.paths.logs, [task.role, *task.frozen], with_engine=False) as cluster,
    ):
        from megarl.train.supervised import SupervisedTrainer

        SupervisedTrainer(task, config, cluster, recorder).fit(checkpoint)
    return recorder


def _heartbeat(recorder: RunRecorder, command: str) -> Heartbeat:
    from megarl.cluster.processes import current_wait

    return Heartbeat(recorder.paths.status, command, current_wait)


def _open_recorder(config: Config, checkpoint: Checkpoint | None, *, overwrite: bool) -> RunRecorder:
    if checkpoint is None:
        return RunRecorder(config, overwrite=overwrite)
    for note in resume_notes(checkpoint, config):
        print(note, flush=True)
    return RunRecorder(config, resumed_step=checkpoint.state.step)


@contextlib.contextmanager
def started_cluster(
    config: Config, log_dir: Path, roles: Sequence[RoleSpec], *, with_engine: bool = True, with_trainer: bool = True
) -> Iterator["Cluster"]:
    """Start a cluster for one command, and close it at the end of this context.

    Inside the context, bad input raises RunError because the run has started; messages say where the logs are.
    """
    from megarl.cluster import Cluster

    try:
        with Cluster(
            config, roles=roles, with_engine=with_engine, with_trainer=with_trainer, log_dir=log_dir
        ) as cluster:
            yield cluster
    except (ConfigError, DataError) as error:
        raise RunError(str(error)) from error
    except WorkerError as error:
        raise WorkerError(str(error).replace("RUN/logs", str(log_dir))) from error
