"""A whole run from a configuration: check everything, start the cluster, train, report."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.config.schema import Config
from megarl.errors import ConfigError, DataError, RunError, WorkerError
from megarl.inputs import open_sft_inputs, open_train_inputs
from megarl.observe import RunRecorder
from megarl.report import write_report

if TYPE_CHECKING:
    from megarl.cluster import Cluster


def train(config: Config, *, overwrite: bool = False) -> RunRecorder:
    """A reinforcement-learning run, from checks to report."""
    inputs = open_train_inputs(config)
    recorder = RunRecorder(config, overwrite=overwrite)
    for data, name in ((inputs.train, "data.train"), (inputs.val, "data.val")):
        if data is not None and data.num_dropped:
            print(f"{name}: dropped {data.num_dropped} prompts over {config.data.max_prompt_tokens} tokens")
    with _started(config, recorder, with_engine=True) as cluster:
        from megarl.trainer import Trainer

        Trainer(inputs, cluster, recorder).fit()
    write_report(recorder.paths.root)
    return recorder


def sft(config: Config, *, overwrite: bool = False) -> RunRecorder:
    """A supervised run, from checks to export."""
    inputs = open_sft_inputs(config)
    recorder = RunRecorder(config, overwrite=overwrite)
    with _started(config, recorder, with_engine=False) as cluster:
        from megarl.sft import run_sft

        run_sft(inputs, cluster, recorder)
    return recorder


@contextlib.contextmanager
def _started(config: Config, recorder: RunRecorder, *, with_engine: bool) -> Iterator["Cluster"]:
    """The cluster of a run. From here on bad input is a failed run; messages get the run's directory."""
    from megarl.cluster import Cluster

    try:
        with Cluster(config, with_engine=with_engine, log_dir=recorder.paths.logs) as cluster:
            yield cluster
    except (ConfigError, DataError) as error:
        raise RunError(str(error)) from error
    except WorkerError as error:
        raise WorkerError(str(error).replace("RUN/logs", str(recorder.paths.logs))) from error
