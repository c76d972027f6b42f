"""Run an evaluation: check inputs, start engines, send weights, generate, judge, estimate, write files."""

import os
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster import offloading
from megarl.cluster.roles import actor_role
from megarl.config.generation import RolloutConfig
from megarl.host.activity import doing
from megarl.host.directory_lock import DirectoryLock
from megarl.host.sharing import shared_with
from megarl.host.streams import print_lines
from megarl.record.progress import Progress, ProgressValues
from megarl.record.recorder import write_settings
from megarl.record.rollouts import JudgedAnswer, results_by_source
from megarl.rewards.build import open_rewards
from megarl.rewards.judge import Judged
from megarl.rewards.manager import Judging, RewardManager
from megarl.rewards.routes import without_training
from megarl.rollout.source import Group, SamplingPlan, Wait, begin, collect
from megarl.rollout.vllm_source import VllmSource
from megarl.run.evaluation.inputs import EvalInputs, EvalRequest, open_eval_inputs
from megarl.run.evaluation.output import results_lines, write_results
from megarl.train.outcome import FAILURES, all_failed_error
from megarl.types import Prompt, RolloutBatch
from megarl.types.judged import Trouble
from megarl.types.messages import LoadRequest

if TYPE_CHECKING:
    from megarl.cluster.cluster import Cluster
    from megarl.cluster.supervisor import EngineSupervisor, WeightSync

# Requests that an engine is given at a time, as a multiple of those that it decodes at a time.
REQUESTS_PER_SLOT = 2


def evaluate(request: EvalRequest) -> None:
    """Evaluate a model, print a table, and write the table and all answers to `request.out`.

    Raises:
        ConfigError, DataError: bad input; nothing was started.
        RunError, WorkerError: it failed later.
    """
    with DirectoryLock(request.out, "eval") as lock, ExitStack() as files:
        inputs = open_eval_inputs(request)
        # Ray and torch, of which nothing so far needed any.
        from megarl.plan.build import derive_run
        from megarl.run.start import starting

        config = inputs.config
        if inputs.data.num_dropped:
            print_lines(
                f"--data: dropped {inputs.data.num_dropped} prompts over {config.data.max_prompt_tokens} tokens"
            )
        for warning in inputs.data.spelled.warnings("--data"):
            print_lines(f"warning: {warning}")
        with shared_with(config.run.share, inputs.out):
            write_settings(inputs.out, config)
            if inputs.data.images is not None:
                inputs.data.images.keeps = True
            if inputs.adapter is not None:
                config = replace(config, model=replace(config.model, path=str(files.enter_context(_merged(inputs)))))
                inputs = replace(inputs, config=config)
            logs, with_trainer, roles = inputs.out / "logs", inputs.checkpoint is not None, [actor_role(config)]
            derived = derive_run(config, roles if with_trainer else [], (), command="eval")
            with starting(logs):
                from megarl.cluster.cluster import Cluster

                with (
                    Cluster(config, roles=roles, with_trainer=with_trainer, log_dir=logs, derived=derived) as cluster,
                    closing(_serving_engines(inputs, cluster)) as supervisor,
                ):
                    unjudged: dict[tuple[str, str], list[Trouble | None]] = defaultdict(list)
                    answers = list(_answers(inputs, cluster, supervisor, unjudged))
            results = results_by_source(answers, inputs.ks, {key: len(each) for key, each in unjudged.items()})
            lock.require()
            if results:
                print_lines(*results_lines(results))
                for path in write_results(inputs.out, results, answers):
                    print_lines(f"wrote {path}")
            for key in unjudged.keys() - {(result.data, result.data_source) for result in results}:
                failures = [each for each in unjudged[key] if each is not None]
                raise all_failed_error(" ".join(key), len(unjudged[key]), failures)


@contextmanager
def _merged(inputs: EvalInputs) -> Iterator[Path]:
    """Merge the adapters into the model, for as long as this context lasts.

    Engines could add them as they compute. Merged, they are the same for every engine and kind of layer, and as fast.
    """
    from megarl.convert.engine import ConvertSettings, partial_dir
    from megarl.convert.merge import merge

    assert inputs.adapter is not None
    model, out = inputs.config.model, inputs.out / "merged"
    settings = ConvertSettings(out=out, num_workers=min(8, len(os.sched_getaffinity(0))), overwrite=True)
    try:
        with doing("merging the adapters"):
            merge(Path(model.path), inputs.adapter, settings, dtype=model.dtype)
        yield out
    finally:
        for path in (out, partial_dir(out)):
            shutil.rmtree(path, ignore_errors=True)


class _OwnWeights:
    """The weight sync of engines that have read the model themselves, as every new engine does: nothing is sent."""

    def push(self, version: int, *, verify: bool) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """There is nothing to close."""


def _serving_engines(inputs: EvalInputs, cluster: "Cluster") -> "EngineSupervisor":
    """Return the supervisor of engines that have the weights to evaluate.

    The policy of a checkpoint, saved under any parallel layout, is loaded and sent to the engines.
    """
    config, role, checkpoint, version = inputs.config, actor_role(inputs.config), inputs.checkpoint, 0
    # Without a policy to load, engines have the devices for themselves, and never drop the weights that they have read.
    offloads = config.placement.offload and checkpoint is not None
    ledger = offloading.MemoryLedger(cluster.workers, cluster.engines, enabled=offloads)
    open_sync: Callable[[], WeightSync] = _OwnWeights
    if checkpoint is not None:
        ledger.enter(offloading.LOAD)
        cluster.workers.load(LoadRequest.of(config.run, [role]))
        ledger.add(offloading.built_parts([role]))
        cluster.workers.load_checkpoint(checkpoint.path, weights_only=True)
        open_sync, version = cluster.weight_sync, checkpoint.state.step
    supervisor = cluster.supervisor(config, ledger, open_sync)
    supervisor.push(version)
    # Its buffers are needed again only if an engine dies.
    supervisor.close()
    ledger.enter(offloading.GENERATE)
    return supervisor


def _answers(
    inputs: EvalInputs,
    cluster: "Cluster",
    supervisor: "EngineSupervisor",
    unjudged: dict[tuple[str, str], list[Trouble | None]],
) -> Iterator[JudgedAnswer]:
    """Yield judged answers, greedy ones first; the progress line counts answers.

    unjudged: gets, by file and data source, why each of the other answers was not judged, if that is known.
    """
    config, sources = inputs.config, inputs.data.data_sources
    rewards_config = without_training(config.rewards, sources)
    prompts = [inputs.data[i] for i in range(len(inputs.data))]
    labels = {prompt.uid: label for prompt, label in zip(prompts, inputs.labels, strict=True)}
    total = len(prompts) * (1 + config.rollout.num_samples)
    num_done, num_tokens, began = 0, 0, time.monotonic()
    with (
        closing(open_rewards(rewards_config, sources, inputs.tokenizer)) as rewards,
        Progress(total=total, description="eval") as progress,
    ):
        hosts = cluster.open_environment_workers({prompt.environment for prompt in prompts} - {""}, config)
        source = VllmSource(supervisor, hosts, config.environment)
        for greedy, batch, judged in _batches(
            config.rollout, config.run.seed, prompts, source, supervisor.wait, rewards
        ):
            supervisor.restart_dead_engines()
            troubles = {id(each.item.sample): each for each in reversed(judged.troubles) if each.outcome in FAILURES}
            for sample, reward in zip(batch.samples, judged.rewards, strict=True):
                prompt = batch.prompts[sample.uid]
                if reward.dropped:
                    unjudged[labels[sample.uid], prompt.data_source].append(troubles.get(id(sample)))
                    continue
                num_tokens += sample.num_response_tokens
                yield JudgedAnswer.of(
                    prompt, sample, reward, greedy=greedy, tokenizer=inputs.tokenizer, data=labels[sample.uid]
                )
            num_done += len(batch.samples)
            progress.update(num_done, ProgressValues(tokens_per_s=num_tokens / (time.monotonic() - began)))
        if unjudged:
            progress.note(f"{sum(map(len, unjudged.values()))} answers that nobody could judge are left out")


def _batches(
    rollout: RolloutConfig,
    run_seed: int,
    prompts: Sequence[Prompt],
    source: VllmSource,
    wait: Wait,
    rewards: RewardManager,
) -> Iterator[tuple[bool, RolloutBatch, Judged]]:
    """Yield batches of whole groups: whether a batch is greedy, its samples, and their verdicts.

    While one batch is collected, the next one is already with the engines, so that they are never idle.
    """
    num_requests = REQUESTS_PER_SLOT * rollout.engine.max_num_seqs * rollout.engine.num_engines
    sampling = rollout.sampling(rollout.stop_token_ids)
    sampled = SamplingPlan(
        step=0,
        num_samples=rollout.num_samples,
        sampling=sampling,
        max_response_tokens=rollout.max_response_tokens,
        run_seed=run_seed,
    )
    pending: deque[tuple[list[Group], Judging]] = deque()
    for plan in (replace(sampled, num_samples=1, sampling=sampling.greedy()), sampled):
        size = max(1, num_requests // plan.num_samples)
        for start in range(0, len(prompts), size):
            chunk = prompts[start : start + size]
            judging = rewards.begin()
            groups = [Group(prompt=prompt, plan=plan, judging=judging) for prompt in chunk]
            begin(source, groups)
            pending.append((groups, judging))
            if len(pending) > 1:
                yield _collected(wait, rewards, *pending.popleft(), rollout.timeout_s)
    while pending:
        yield _collected(wait, rewards, *pending.popleft(), rollout.timeout_s)


def _collected(
    wait: Wait, rewards: RewardManager, groups: Sequence[Group], judging: Judging, timeout_s: float
) -> tuple[bool, RolloutBatch, Judged]:
    rollout = collect(wait, groups, timeout_s=timeout_s)
    return groups[0].plan.sampling.temperature == 0.0, rollout, rewards.finish([judging], rollout.samples)
