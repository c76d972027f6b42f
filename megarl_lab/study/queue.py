"""Run a study: a queue of reinforcement-learning runs, one after the other on one live cluster.

    base: configs/run/sums-rl.yaml
    dir: runs/study
    overrides: [trainer.total_steps=25]
    runs:
      - {algo: grpo, seed: 0}
      - {algo: ppo, seed: 0, overrides: [trainer.num_epochs=2]}

A run is called ALGO-seedN. Everything is checked before the cluster starts. A finished run is skipped, an unfinished
one goes on after its last checkpoint, or from its beginning if it has none. After a failure the others go on with new
processes: what a failure left of the old ones is unknown.
"""

import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cluster.roles import by_layout, check_serves, engine_spec
from megarl.config import from_dict, load_config
from megarl.config.derived import Derived
from megarl.config.load import read_yaml, saved_config
from megarl.config.model_names import with_models
from megarl.config.part_settings import use_plugins_of
from megarl.config.schema import Config
from megarl.errors import ConfigError, DataError, RunError, RunStopped
from megarl.host.directory_lock import DirectoryLock
from megarl.host.sharing import shared_with
from megarl.host.signals import last_stop_signal
from megarl.host.streams import print_lines
from megarl.plan.build import derive_run, settle_run
from megarl.record.checkpoints import complete_steps
from megarl.record.inputs import RunInputs, texts_of
from megarl.record.metrics import RunPaths, read_metrics
from megarl.record.plugins import require_same_plugins
from megarl.report import write_report
from megarl.report.run import load_runs
from megarl.report.summary import SAMPLED, validation_curve
from megarl.run.resume import changed_settings, find_checkpoint, with_models_of_run
from megarl.run.start import recorded
from megarl.train.export import exported
from megarl.train.inputs import open_train_inputs
from megarl.train.validate import has_collapsed
from megarl.types.messages import RoleSpec
from megarl.weights.hub import local_model

if TYPE_CHECKING:
    from megarl.cluster.cluster import Cluster

# The study itself sets these in every run.
OWN_KEYS = ("run.dir", "run.name", "run.seed", "use.algo")
# Keys of a config.json that say nothing about the model's shape.
_INCIDENTAL = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRun:
    """A run that a study asks for: a file of configs/algo, a seed, and settings of its own."""

    algo: str
    seed: int = 0
    name: str | None = None  # It is called NAME-seedN; null: the algorithm file's name.
    overrides: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return f"{self.name or Path(self.algo).stem}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The content of a study file; `overrides` are settings of all runs, and those of a run come after them."""

    base: str
    dir: str
    runs: tuple[QueuedRun, ...]
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A checked run that has not been done yet; `place` is its number in the study, from 1."""

    place: int
    config: Config
    roles: tuple[RoleSpec, ...]
    architecture: Mapping[str, Any]
    derived: tuple[Derived, ...]

    @property
    def name(self) -> str:
        return self.config.run.name


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """The state of a study: the runs that are finished, by their place in it, and the runs that are still to do."""

    num_runs: int
    finished: Mapping[int, str]
    waiting: tuple[PlannedRun, ...]

    @property
    def cluster_config(self) -> Config:
        """Return the configuration that starts the cluster: the remaining run's with the longest context."""
        return max((run.config for run in self.waiting), key=lambda config: engine_spec(config).max_model_tokens)

    @property
    def roles(self) -> tuple[RoleSpec, ...]:
        """Return every role and layout of the remaining runs, since the ranks must have room for all of them."""
        return tuple({(role.role, role.layout): role for run in self.waiting for role in run.roles}.values())

    @property
    def derived(self) -> tuple[Derived, ...]:
        """Return, for settings that are null, what suits all remaining runs: the least memory that the trainer of one
        leaves to engines, and the largest store.
        """
        found = dict[str, Derived]()
        for each in (derived for run in self.waiting for derived in run.derived):
            pick = max if each.key == "cluster.object_store_mib" else min
            found[each.key] = pick(found.get(each.key, each), each, key=attrgetter("value"))
        return tuple(found.values())


def load_study(path: Path) -> Study:
    """Read a study file. An unknown key or a wrong type raises a ConfigError that names the file."""
    try:
        study = from_dict(Study, read_yaml(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not study.runs:
        raise ConfigError(f"{path}: runs: is empty, expected a list such as [{{algo: grpo, seed: 0}}]")
    names = [run.full_name for run in study.runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: runs: {twice} is there twice; give one of them another seed or a name")
    return study


def run_config(study: Study, run: QueuedRun) -> Config:
    """Return the configuration of one run of a study, with its models fetched from the hub if need be."""
    for override in (*study.overrides, *run.overrides):
        if (key := override.partition("=")[0].strip()) in OWN_KEYS:
            raise ConfigError(f"{run.full_name}: overrides set {key}, which the study decides; remove it")
    own = [f"run.dir={study.dir}", f"run.name={run.full_name}", f"run.seed={run.seed}", f"use.algo={run.algo}"]
    config = load_config(Path(study.base), [*own, *study.overrides, *run.overrides])
    return with_models(with_models_of_run(config), local_model)


def is_finished(config: Config) -> bool:
    """Return whether a run has its export and its last step's metrics; ConfigError if it began with other settings."""
    paths = RunPaths.of(config.run)
    is_exported = exported(paths) is not None
    if not paths.metrics.is_file() or not (is_exported or complete_steps(paths.checkpoints)):
        return False
    require_same_plugins(paths, config.algo.plugins)
    use_plugins_of(config)
    saved = saved_config(paths.saved_tree())
    # The study's directory may have been moved.
    saved = replace(saved, run=replace(saved.run, dir=config.run.dir))
    # A run computes the same, wherever a collapse ends it.
    same = replace(saved.validation, stop_after_zeros=config.validation.stop_after_zeros)
    saved = replace(saved, validation=same)
    if changes := changed_settings(saved, config):
        raise ConfigError(
            f"{paths.root}: began with other settings: {'; '.join(changes)}; restore them, remove the run, or "
            f"choose another dir"
        )
    last = max((record.step for record in read_metrics(paths.metrics)), default=0)
    collapsed = has_collapsed(paths.metrics, config.checkpoint.best_metric, config.validation.stop_after_zeros)
    return is_exported and (last == config.trainer.total_steps or collapsed)


def plan_study(study: Study) -> StudyPlan:
    """Check every run that is still to do: its settings, model and data, and that one cluster serves all."""
    finished, waiting = {}, []
    for place, queued in enumerate(study.runs, start=1):
        try:
            config = run_config(study, queued)
            if is_finished(config):
                finished[place] = config.run.name
                continue
            inputs = open_train_inputs(config)
            config, roles = settle_run(config, inputs.roles, inputs.algorithm.requires())
        except (ConfigError, DataError) as error:
            raise type(error)(f"{queued.full_name}: {error}") from error
        planned = PlannedRun(
            place=place,
            config=config,
            roles=roles,
            architecture={k: v for k, v in inputs.spec.hf_config.items() if k not in _INCIDENTAL},
            derived=derive_run(config, roles, inputs.algorithm.requires()),
        )
        waiting.append(planned)
    plan = StudyPlan(num_runs=len(study.runs), finished=finished, waiting=tuple(waiting))
    for run in waiting:
        try:
            check_serves(plan.cluster_config, by_layout(plan.roles), run.config, run.roles)
        except ConfigError as error:
            raise ConfigError(f"{run.name}: {error}") from error
        if run.architecture != waiting[0].architecture:
            raise ConfigError(
                f"{run.name}: the model in {run.config.model.path} is not of the shape of that in "
                f"{waiting[0].config.model.path}, so one cluster cannot serve both; make another study for it"
            )
    return plan


def plan_text(plan: StudyPlan) -> str:
    """Return a line per run, in the order of the study: finished, or to do."""
    lines = {place: f"{name}: finished" for place, name in plan.finished.items()}
    lines |= {run.place: f"{run.name}: to do" for run in plan.waiting}
    return "\n".join(f"[{place}/{plan.num_runs}] {lines[place]}" for place in sorted(lines))


def run_study(study: Study) -> list[str]:
    """Run what is still to do, and print a line per run. Returns the names of the runs that failed.

    Raises:
        ConfigError: the study is bad, or another process does it already.
        RunStopped: a signal ended the study early.
    """
    with DirectoryLock(Path(study.dir), "study"):
        plan = plan_study(study)
        for place, name in plan.finished.items():
            _report(plan, place, f"{name}: finished before, skipped")
        waiting, failed, began = deque(plan.waiting), list[str](), time.monotonic()
        while waiting:
            failed += _run_until_failure(study, plan, waiting)
    counts = f"{len(plan.waiting) - len(failed)} done, {len(plan.finished)} skipped, {len(failed)} failed"
    names = f": {', '.join(failed)}" if failed else ""
    print_lines(f"{plan.num_runs} runs in {time.monotonic() - began:.0f} s: {counts}{names}")
    return failed


def _report(plan: StudyPlan, place: int, text: str) -> None:
    print_lines(f"[{place}/{plan.num_runs}] {text}")


def _run_until_failure(study: Study, plan: StudyPlan, waiting: deque[PlannedRun]) -> list[str]:
    """Do the remaining runs in turn on one cluster until all are done or one fails; return the one that failed."""
    from megarl.cluster.cluster import Cluster

    logs = Path(study.dir) / "logs"
    try:
        cluster = Cluster(plan.cluster_config, roles=plan.roles, with_judges=True, log_dir=logs, derived=plan.derived)
    except (ConfigError, DataError) as error:
        raise RunError(str(error)) from error
    with shared_with(plan.cluster_config.run.share, Path(study.dir)), cluster:
        while waiting:
            run, began = waiting.popleft(), time.monotonic()
            try:
                result = _train(run, cluster)
            except RunStopped as stopped:
                raise RunStopped(f"{study.dir}: {run.name} was stopped; the same command goes on") from stopped
            # Whatever it is, the other runs may be sound.
            except Exception as error:
                cluster.close(failed=True)
                if not type(error).__module__.startswith("megarl"):
                    traceback.print_exception(error)
                cause = f"{type(error).__name__}: {' '.join(str(error).split())}".replace("RUN/logs", str(logs))
                _report(plan, run.place, f"{run.name}: FAILED after {time.monotonic() - began:.0f} s, {cause}")
                return [run.name]
            _report(plan, run.place, f"{run.name}: {result} in {time.monotonic() - began:.0f} s")
            if (signum := last_stop_signal()) is not None:
                raise RunStopped(f"{study.dir}: stopped by {signum.name} after {run.name}; the same command goes on")
    return []


def _train(run: PlannedRun, cluster: "Cluster") -> str:
    """Train one run from its last checkpoint, or from its beginning, to its report; return its result in words."""
    from megarl.train.wiring import build_trainer

    inputs = open_train_inputs(run.config)
    for warning in inputs.warnings:
        print_lines(f"{run.name}: warning: {warning}")
    paths = RunPaths.of(run.config.run)
    with DirectoryLock(paths.root, "study") as lock:
        files = RunInputs.of(texts_of(run.config), "train")
        begun = bool(complete_steps(paths.checkpoints))
        checkpoint = find_checkpoint(run.config, "train", files=files) if begun else None
        with recorded(run.config, lock, checkpoint, files, overwrite=True, resumes=False) as recorder:
            build_trainer(inputs, cluster, recorder).fit(checkpoint)
        write_report(recorder.paths.root)
        (trained,) = load_runs([recorder.paths.root])
    # `validation 0.441 ± 0.031 → 0.965 ± 0.012`, or the reward of the last step of a run without validation.
    if curve := validation_curve(trained, SAMPLED):
        return f"validation {' → '.join(str(point) for point in dict.fromkeys((curve[0], curve[-1])))}"
    rewards = trained.get("critic/score/mean").values
    return f"reward {rewards[-1]:.3f} at the last step" if rewards else "no step had rows to train on"
