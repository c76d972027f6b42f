"""Start a whole run from a configuration: check everything, start the cluster, train, report."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megarl.config.schema import Config
from megarl.errors import ConfigError, DataError, RunError, WorkerError
from megarl.host.activity import current_activity, doing
from megarl.host.directory_lock import DirectoryLock
from megarl.host.sharing import shared_with
from megarl.host.streams import print_lines
from megarl.host.temp_dir import choose_temp_root, temp_root
from megarl.host.writing import dispensable, writing
from megarl.launch.status import Heartbeat
from megarl.plan.build import derive_run, open_task, settle_run, start_warnings
from megarl.plan.render import derived_lines
from megarl.plan.sizes import derive_trainer
from megarl.record.checkpoints import Checkpoint, Command, Resume, forget_after
from megarl.record.inputs import RunInputs, texts_of
from megarl.record.metrics import RunPaths
from megarl.record.recorder import RunRecorder
from megarl.report import write_report
from megarl.run.resume import find_checkpoint, require_plugins_of_run, resume_notes, with_models_of_run
from megarl.train.export import exported
from megarl.train.inputs import open_train_inputs


def train(config: Config, *, overwrite: bool = False, resume: Resume | None = None) -> RunRecorder:
    """Run reinforcement learning from the first check to the report. Raises RunStopped if a signal ends it early."""
    from megarl.cluster.prelude import Prelude

    root = RunPaths.of(config.run).root
    # Engines that read images import torchvision first, and so vLLM themselves.
    forks_engines = config.image_store is None
    with (
        DirectoryLock(root, "train") as lock,
        Prelude(config.cluster, config.run, with_engine=forks_engines) as prelude,
    ):
        with doing("reading model and data"):
            if resume:
                require_plugins_of_run(config)
            inputs = open_train_inputs(with_models_of_run(config) if resume else config)
        config, roles = settle_run(inputs.config, inputs.roles, inputs.algorithm.requires())
        inputs = replace(inputs, config=config, roles=roles)
        derived = derive_run(config, roles, inputs.algorithm.requires())
        files = RunInputs.of(texts_of(config), "train")
        checkpoint = find_checkpoint(config, "train", resume, files) if resume else None
        with recorded(config, lock, checkpoint, files, overwrite=overwrite, resumes=resume is not None) as recorder:
            for warning in (*inputs.warnings, *start_warnings(config)):
                print_lines(f"warning: {warning}")
            if inputs.train.images is not None:
                inputs.train.images.keeps = True
            with _heartbeat(recorder, lock, "train"), starting(logs := recorder.paths.logs):
                from megarl.cluster.cluster import Cluster

                with Cluster(
                    config, roles=inputs.roles, with_judges=True, log_dir=logs, derived=derived, prelude=prelude
                ) as cluster:
                    from megarl.train.wiring import build_trainer

                    build_trainer(inputs, cluster, recorder).fit(checkpoint)
            return _reported(recorder)


def train_supervised(
    command: Command, config: Config, *, overwrite: bool = False, resume: Resume | None = None
) -> RunRecorder:
    """Run supervised training from the first check to the report. Raises RunStopped if a signal ends it early."""
    from megarl.cluster.prelude import Prelude

    root = RunPaths.of(config.run).root
    with DirectoryLock(root, command) as lock, Prelude(config.cluster, config.run, with_engine=False) as prelude:
        with doing("reading model and data"):
            if resume:
                require_plugins_of_run(config)
            opened, chosen = open_task(command, with_models_of_run(config) if resume else config)
        inputs, task, config = opened.inputs, opened.task, opened.inputs.config
        print_lines(*derived_lines(chosen))
        derived = derive_trainer(config, command)
        files = RunInputs.of(texts_of(config), command)
        checkpoint = find_checkpoint(config, command, resume, files) if resume else None
        with recorded(config, lock, checkpoint, files, overwrite=overwrite, resumes=resume is not None) as recorder:
            for line in (*inputs.notes, *(f"warning: {warning}" for warning in inputs.warnings)):
                print_lines(line)
            if inputs.images is not None:
                inputs.images.keeps = True
            with _heartbeat(recorder, lock, command), starting(logs := recorder.paths.logs):
                from megarl.cluster.cluster import Cluster

                roles = [task.role, *task.frozen]
                with Cluster(
                    config, roles=roles, with_engine=False, log_dir=logs, derived=derived, prelude=prelude
                ) as cluster:
                    from megarl.train.supervised import SupervisedTrainer

                    SupervisedTrainer(task, inputs, cluster, recorder).fit(checkpoint)
            return _reported(recorder)


def _reported(recorder: RunRecorder) -> RunRecorder:
    """Write the report of a finished run, and say where it and the model are."""
    with doing("writing the report"), dispensable("the report", Exception), writing(recorder.paths.report_html):
        write_report(recorder.paths.root)
        print_lines(f"report: {recorder.paths.report_html}")
    if (model := exported(recorder.paths)) is not None:
        print_lines(f"model:  {model}")
    return recorder


def _heartbeat(recorder: RunRecorder, lock: DirectoryLock, command: str) -> Heartbeat:
    return Heartbeat(recorder.paths.status, command, current_activity, is_owned=lock.is_owned)


@contextlib.contextmanager
def recorded(
    config: Config,
    lock: DirectoryLock,
    checkpoint: Checkpoint | None,
    files: RunInputs,
    *,
    overwrite: bool,
    resumes: bool,
) -> Iterator[RunRecorder]:
    """Open the run's recorder; within this context, what is written is shared as `run.share` says."""
    files.hash_in_background()
    with shared_with(config.run.share, lock.directory):
        if checkpoint is not None:
            print_lines(*resume_notes(checkpoint, config, files))
            forget_after(checkpoint.path.parent, checkpoint.state.step)
        step = None if checkpoint is None else checkpoint.state.step
        yield RunRecorder(config, lock=lock, inputs=files, overwrite=overwrite, resumes=resumes, resumed_step=step)


@contextlib.contextmanager
def starting(log_dir: Path) -> Iterator[None]:
    """Say where temporary files will be; within this context, a command starts a cluster and uses it.

    Inside the context, bad input raises RunError because the run has started; messages say where the logs are.
    """
    root = temp_root()
    for passed_over in choose_temp_root().problems:
        print_lines(f"warning: temporary files will be in {root}, not in {passed_over}")
    try:
        yield
    except (ConfigError, DataError) as error:
        raise RunError(str(error)) from error
    except WorkerError as error:
        raise WorkerError(str(error).replace("RUN/logs", str(log_dir))) from error
