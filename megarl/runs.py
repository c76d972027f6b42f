"""A whole run from a configuration: check everything, start the cluster, train, report."""

from megarl.config.schema import Config
from megarl.inputs import open_sft_inputs, open_train_inputs
from megarl.observe import RunRecorder
from megarl.report import write_report


def train(config: Config, *, overwrite: bool = False) -> RunRecorder:
    """A reinforcement-learning run, from checks to report."""
    inputs = open_train_inputs(config)
    recorder = RunRecorder(config, overwrite=overwrite)
    from megarl.cluster import Cluster
    from megarl.trainer import Trainer

    with Cluster(config, log_dir=recorder.paths.logs) as cluster:
        Trainer(inputs, cluster, recorder).fit()
    write_report(recorder.paths.root)
    return recorder


def sft(config: Config, *, overwrite: bool = False) -> RunRecorder:
    """A supervised run, from checks to export."""
    inputs = open_sft_inputs(config)
    recorder = RunRecorder(config, overwrite=overwrite)
    from megarl.cluster import Cluster
    from megarl.sft import run_sft

    with Cluster(config, with_engine=False, log_dir=recorder.paths.logs) as cluster:
        run_sft(inputs, cluster, recorder)
    return recorder
