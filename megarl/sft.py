"""Supervised warm start: the trainer's models, workers and optimizer steps on demonstrations."""

from megarl.algos.sft import SftAlgorithm
from megarl.cluster import Cluster
from megarl.data.sampler import PromptSampler
from megarl.export import export_model
from megarl.inputs import SftInputs
from megarl.metrics import Timers
from megarl.observe import RunRecorder, resident_memory
from megarl.parallel.messages import LoadRequest
from megarl.progress import Progress, ProgressValues
from megarl.updates import PolicyUpdater


def run_sft(inputs: SftInputs, cluster: Cluster, recorder: RunRecorder) -> None:
    """Train for `sft.total_steps` steps of `sft.batch_size` demonstrations, then export."""
    config, total = inputs.config, inputs.config.sft.total_steps
    algorithm = SftAlgorithm()
    cluster.workers.load(
        LoadRequest(model=config.model, actor=config.actor, with_reference=False, seed=config.run.seed)
    )
    updater = PolicyUpdater(cluster.workers, config.actor, algorithm, total_steps=total)
    sampler = PromptSampler(len(inputs.train), config.sft.batch_size, config.run.seed, config.data.shuffle)
    state, timers = algorithm.initial_state(), Timers()
    with recorder.metrics() as log, Progress(total=total, description=config.run.name) as progress:
        for step in range(1, total + 1):
            rows = [inputs.train[i] for i in sampler.next_batch()]
            with timers("step"), timers("update_actor"):
                result = updater.update(rows, state, step=step)
            times = timers.pop()
            tokens_per_s = sum(row.num_tokens for row in rows) / times["timing_s/step"]
            metrics = {**result.metrics} | times | {"perf/tokens_per_s": tokens_per_s}
            log.log(step, metrics | resident_memory(cluster.pids))
            progress.update(step, ProgressValues(loss=metrics["actor/loss"], tokens_per_s=tokens_per_s))
    export_model(cluster.workers, inputs.spec, config.model.dtype, recorder.paths.export)
