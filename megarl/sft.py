"""Supervised warm start: the trainer's models, workers and optimizer steps on demonstrations."""

from functools import partial

from megarl.algos.sft import SftAlgorithm
from megarl.checkpoint import Checkpoint, CheckpointManager, RunState
from megarl.cluster import Cluster
from megarl.data.sampler import PromptSampler
from megarl.export import export_model
from megarl.inputs import SftInputs
from megarl.metrics import Timers
from megarl.observe import RunRecorder, resident_memory
from megarl.parallel.messages import LoadRequest
from megarl.progress import Progress, ProgressValues
from megarl.roles import actor_role
from megarl.signals import stop_on_signals
from megarl.updates import RoleUpdater


def run_sft(inputs: SftInputs, cluster: Cluster, recorder: RunRecorder, checkpoint: Checkpoint | None = None) -> None:
    """Train up to step `sft.total_steps`, on `sft.batch_size` demonstrations a step, then export.

    Raises:
        RunStopped: a signal ended the run early; its checkpoint is complete.
    """
    config, total = inputs.config, inputs.config.sft.total_steps
    algorithm = SftAlgorithm()
    actor = actor_role(config)
    cluster.workers.load(LoadRequest(roles=(actor,), seed=config.run.seed, deterministic=config.run.deterministic))
    updater = RoleUpdater(cluster.workers, actor, algorithm, total_steps=total)
    sampler = PromptSampler(len(inputs.train), config.sft.batch_size, config.run.seed, config.data.shuffle)
    state, timers = algorithm.initial_state(), Timers()
    checkpoints = CheckpointManager(recorder.paths.checkpoints, config.checkpoint, cluster.workers)
    start = 0
    if checkpoint is not None:
        start = checkpoint.state.step
        cluster.workers.load_checkpoint(checkpoint.path, same_layout=checkpoint.same_layout(config))
        sampler.load_state_dict(checkpoint.state.sampler)
        updater.num_optimizer_steps = checkpoint.state.num_optimizer_steps

    def run_state(step: int) -> RunState:
        return RunState(
            command="sft",
            step=step,
            num_optimizer_steps=updater.num_optimizer_steps,
            sampler=sampler.state_dict(),
            algo=state,
            source={},
            score=None,
            config=config,
        )

    with (
        recorder.metrics() as log,
        Progress(total=total, initial=start, description=config.run.name) as progress,
        stop_on_signals() as stop,
    ):
        for step in range(start + 1, total + 1):
            rows = [inputs.train[i] for i in sampler.next_batch()]
            with timers("step"), timers("update_actor"):
                result = updater.update(rows, state, step=step)
            times = timers.pop()
            tokens_per_s = sum(row.num_tokens for row in rows) / times["timing_s/step"]
            metrics = {**result.metrics} | times | {"perf/tokens_per_s": tokens_per_s}
            log.log(step, metrics | resident_memory(cluster.pids))
            progress.update(step, ProgressValues(loss=metrics["actor/loss"], tokens_per_s=tokens_per_s))
            checkpoints.after_step(step, total=total, stop=stop, state=partial(run_state, step))
    export_model(cluster.workers, actor, recorder.paths.export)
