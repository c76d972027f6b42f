"""Find the checkpoint and the models that `--resume` continues with, and check that the configuration still fits."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from megarl.algos.advantages import estimator_of
from megarl.config.batches import batch_counts, num_actor_steps
from megarl.config.load import masked_config
from megarl.config.model_names import models_of, with_models
from megarl.config.optimizer import learning_rate
from megarl.config.schema import Config, role_settings
from megarl.config.setting import differences
from megarl.errors import ConfigError
from megarl.host.reading import RESTORE, read_object
from megarl.record.checkpoints import (
    Checkpoint,
    Command,
    Resume,
    RunState,
    checkpoint_dir,
    complete_steps,
    last_checkpoint,
    torn_steps,
)
from megarl.record.inputs import RunInputs, names_file, texts_of
from megarl.record.metrics import STATE_FILE, RunPaths
from megarl.record.plugins import require_same_plugins
from megarl.train.export import exported
from megarl.types.messages import Role

_SCHEDULE = ("lr", "clip_grad_norm", "warmup_steps", "schedule", "decay_frac", "min_lr_frac")
# A resumed run may change these: where and how it computes, how long, and what it writes. The rest decides what it
# optimises, on which data, in which order.
_SETTINGS = (
    "run.name run.dir run.share actor.layout actor.recompute actor.recompute_modules "
    "actor.recompute_layers actor.recompute_unit actor.micro_batch_tokens actor.head actor.lora.sync "
    "actor.lora.export reference.layout reference.micro_batch_tokens teacher.layout "
    "teacher.micro_batch_tokens teacher.servers teacher.writers teacher.api_key_env teacher.timeout_s "
    "reward_model.layout reward_model.micro_batch_tokens critic.layout critic.recompute "
    "critic.micro_batch_tokens rollout.timeout_s rollout.record rollout.engine rewards.verifier "
    "rewards.custom.pass_env environment.pass_env rewards.code.workers placement sync trainer.total_steps "
    "trainer.mismatch_gate_nats validation sft.total_steps sft.val_every_steps train_reward.total_steps "
    "train_reward.val_every_steps train_preference.total_steps train_preference.val_every_steps logging "
    "checkpoint cluster"
)
CONTINUABLE = (
    *_SETTINGS.split(),
    *(f"actor.moe.{key}" for key in ("grouped_gemm", "fuse_permute", "fuse_router")),
    *(f"{role}.optimizer.{key}" for role in ("actor", "critic") for key in (*_SCHEDULE, "overlap_param_gather")),
    *(f"rewards.remote.{key}" for key in ("urls", "rows_per_request", "timeout_s", "retries", "backoff_s")),
)


# The section that sets the length of a command's runs, and that length in steps.
_TOTAL_STEPS: Mapping[Command, Callable[[Config], tuple[str, int]]] = {
    "train": lambda config: ("trainer", config.trainer.total_steps),
    "sft": lambda config: ("sft", config.sft.total_steps),
    "train-reward": lambda config: ("train_reward", config.train_reward.total_steps),
    "train-preference": lambda config: ("train_preference", config.train_preference.total_steps),
}


def with_models_of_run(config: Config) -> Config:
    """Return the configuration with the commits of the hub's models that its run has begun with, if it has begun."""
    versions = RunPaths.of(config.run).versions
    commits = read_object(versions, remedy=RESTORE) if versions.is_file() else {}

    def pinned(name: str, key: str) -> str:
        commit = commits.get(f"{key}: {name}")
        return name if commit is None else f"{name}@{commit}"

    return with_models(config, pinned, judges=True)


def require_plugins_of_run(config: Config) -> None:
    """Raise ConfigError if a plugin is not what the run has begun with; a run without a checkpoint begins anew."""
    paths = RunPaths.of(config.run)
    if complete_steps(paths.checkpoints):
        require_same_plugins(paths, config.algo.plugins)


def changed_settings(old: Config, new: Config) -> list[str]:
    """List `dotted.key: old → new` for every setting in which two runs differ, as far as saved ones show it: they have
    no secrets.

    If neither run has a critic, settings of the critic are ignored: checkpoints of earlier versions may hold unused
    ones.
    """
    if new.actor.recompute == "auto":
        new = replace(new, actor=replace(new.actor, **old.actor.recompute_settings()))
    # Nothing is known here of other plugins.
    if old.algo.plugins == new.algo.plugins and not any(estimator_of(each.algo).needs_values for each in (old, new)):
        old = replace(old, critic=new.critic)
    return [f"{key}: {before} → {after}" for key, before, after in differences(masked_config(old), masked_config(new))]


def find_checkpoint(
    config: Config, command: Command, resume: Resume = "newest", files: RunInputs | None = None
) -> Checkpoint | None:
    """Return the run directory's last complete checkpoint; None if the run has to start from scratch.

    resume: what is wanted if that one is damaged; see `Resume`. files: what the run computes from; None: look.

    Raises:
        ConfigError: the checkpoint cannot be continued with this configuration, or the run ended without one.
        DataError: the checkpoint is damaged, or, with newest-whole, all of them are.
    """
    paths = RunPaths.of(config.run)
    checkpoint = last_checkpoint(paths.checkpoints, resume)
    if checkpoint is None:
        if exported(paths) is not None:
            raise ConfigError(
                f"{paths.root} holds a finished run without a checkpoint, which --resume would replace; "
                f"choose another run.name, or pass --overwrite"
            )
        return None
    changed, moved, _ = (files or RunInputs.of(texts_of(config), command)).changes_since(checkpoint.state.inputs)
    allowed = _require_continuable(checkpoint, config, command, tuple(f"{key}:" for key in moved))
    compared = {key: names for key, names in changed.items() if not f"{key}:".startswith(allowed)}
    require_same_files(checkpoint, config, compared, remedy="choose another run.name")
    return checkpoint


def check_resumed(config: Config, command: Command) -> Iterator[str]:
    """Raise ConfigError if the newest checkpoint cannot be continued with these settings, as `find_checkpoint` does.

    Only its state is read: models and files of other names may be the same ones. Without a checkpoint, yield where the
    run starts.
    """
    paths = RunPaths.of(config.run)
    require_plugins_of_run(config)
    if not (steps := complete_steps(paths.checkpoints)):
        find_checkpoint(config, command)
        yield f"no checkpoint in {paths.checkpoints}: the run starts from its first step"
        if not paths.hold_a_run() and (meant := _meant(paths.root)):
            yield f"warning: --resume: {paths.root} holds no run, but {meant} does; correct run.dir or run.name"
        return
    path = checkpoint_dir(paths.checkpoints, steps[-1])
    try:
        state = RunState.from_json((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        # The run looks through all of it, and says what to do.
        return
    models = models_of(state.config, judges=True)
    config = with_models(config, lambda name, key: models.get(key, name), judges=True)
    section, _ = _TOTAL_STEPS[command](config)
    if (settings := getattr(config, section)).total_epochs is not None:
        # How many steps they are is known with the rows.
        settings = replace(settings, total_epochs=None, total_steps=max(settings.total_steps, state.step))
        config = replace(config, **{section: settings})
    changes = differences(state.config, config)
    named = [f"{key}:" for key, _, now in changes if now and names_file(key)]
    _require_continuable(Checkpoint(path=path, state=state), config, command, named)


def _meant(root: Path) -> Path | None:
    """Return the directory of a run of which one part of the name is nearly the same, and not another number."""
    for part in (root.parent, root):
        with suppress(OSError):
            for name in get_close_matches(part.name, [each.name for each in part.parent.iterdir()], cutoff=0.7):
                found = part.with_name(name) / root.relative_to(part)
                if re.sub(r"\d", "", name) != re.sub(r"\d", "", part.name) and RunPaths(found).hold_a_run():
                    return found
    return None


def _require_continuable(
    checkpoint: Checkpoint, config: Config, command: Command, others: Sequence[str]
) -> tuple[str, ...]:
    """Raise ConfigError for settings with which a run cannot go on; return the beginnings of those that may change."""
    if checkpoint.state.command != command:
        raise ConfigError(
            f"{checkpoint.path}: was written by megarl {checkpoint.state.command}, which continues it; "
            f"choose another run.name for megarl {command}"
        )
    _require_readable_layout(checkpoint, config)
    section, total = _TOTAL_STEPS[command](config)
    if checkpoint.state.step > total:
        raise ConfigError(
            f"{section}.total_steps: got {total}, expected >= {checkpoint.state.step}, the steps that "
            f"{checkpoint.path} has done"
        )
    allowed = (*(f"{key}{end}" for key in CONTINUABLE for end in (":", ".")), *others)
    refused = [change for change in changed_settings(checkpoint.state.config, config) if not change.startswith(allowed)]
    if refused:
        raise ConfigError(
            f"{checkpoint.path}: cannot be continued with other settings: {'; '.join(refused)}; "
            f"restore them, or choose another run.name"
        )
    return allowed


def require_same_files(
    checkpoint: Checkpoint, config: Config, changed: Mapping[str, Sequence[str]], *, remedy: str
) -> None:
    """Raise ConfigError for files that have changed, by setting, unless the configuration accepts it."""
    if unaccepted := {key: names for key, names in changed.items() if key not in config.checkpoint.accept_changed}:
        told = "; ".join(f"{key}: {', '.join(names)}" for key, names in unaccepted.items())
        raise ConfigError(
            f"{checkpoint.path}: files that the run computes from have changed since it began: {told}; restore them, "
            f"{remedy}, or accept it with checkpoint.accept_changed=[{','.join(unaccepted)}]"
        )


def _require_readable_layout(checkpoint: Checkpoint, config: Config) -> None:
    """Raise ConfigError if a trained role's layout differs beyond dp from a checkpoint's that is not portable."""
    if checkpoint.state.portable:
        return
    before, now = role_settings(checkpoint.state.config), role_settings(config)
    roles = ("actor", "critic") if estimator_of(config.algo).needs_values else ("actor",)
    for role in roles:
        old, new = before[role].layout, now[role].layout
        if replace(old, dp=new.dp).division != new.division and now[role].optimizer.distributed:
            changed = "; ".join(
                f"{key}: {was} → {wanted}" for key, was, wanted in differences(old, new, f"{role}.layout.")
            )
            raise ConfigError(
                f"{changed}: {checkpoint.path} is not portable, so only dp may change; continue with the old layout "
                "and checkpoint.portable=true until the next checkpoint, and change the layout then"
            )


def resume_notes(checkpoint: Checkpoint, config: Config, files: RunInputs) -> list[str]:
    """List what a user should know about a resumed run: where it starts, and what has changed."""
    notes = [f"continuing after step {checkpoint.state.step} from {checkpoint.path}"]
    later = [step for step in torn_steps(checkpoint.path.parent) if step > checkpoint.state.step]
    notes += [f"{checkpoint_dir(checkpoint.path.parent, step)}: was not completed, and is not used" for step in later]
    section, total = _TOTAL_STEPS[checkpoint.state.command](config)
    if checkpoint.state.step == total:
        notes.append(f"all {total} steps are done: only the export is written; raise {section}.total_steps to go on")
    notes += [f"changed since the checkpoint: {change}" for change in changed_settings(checkpoint.state.config, config)]
    before, now = (_next_rate(checkpoint.state, each, like=config) for each in (checkpoint.state.config, config))
    if before != now:
        notes.append(f"changed by that: the learning rate of the next step: {before:.3g} → {now:.3g}")
    changed, _, untold = files.changes_since(checkpoint.state.inputs)
    notes += [f"changed since the checkpoint: {key}: {', '.join(names)}" for key, names in changed.items()]
    notes += [f"written anew since the checkpoint, perhaps the same: {name}" for name in untold]
    if len(checkpoint.same_layout(role_settings(config))) < len(Role):
        notes.append("another layout: random number generators are seeded anew")
    return notes


def _next_rate(state: RunState, config: Config, *, like: Config) -> float:
    """Return the learning rate of the step after `state` under `config`; `like` says if there is a critic."""
    _, total = _TOTAL_STEPS[state.command](config)
    if state.command == "train":
        total = num_actor_steps(config, has_critic=estimator_of(like.algo).needs_values)
        total *= batch_counts(config).optimizer_steps_per_step
    return learning_rate(config.actor.optimizer, state.num_optimizer_steps, total)
