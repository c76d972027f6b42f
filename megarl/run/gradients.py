"""Define the command `megarl compare-gradients`: one recorded batch, its gradient computed in two ways."""

import argparse
import contextlib
import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from megarl.errors import ConfigError, DataError
from megarl.host.exit_codes import EXIT_FAILED
from megarl.host.streams import print_lines

if TYPE_CHECKING:
    from megarl.record.checkpoints import Checkpoint
    from megarl.record.metrics import RunPaths
    from megarl.run.session_inputs import SessionInputs
    from megarl.train.collect import Collected

# The file beside a saved gradient's tensors that says of what it is.
_ABOUT = "gradient.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """The origin of a gradient. batch: a digest of the rows' tokens. dtype: what it was computed in."""

    batch: str
    num_rows: int
    dtype: str

    @classmethod
    def read(cls, directory: Path) -> Self:
        try:
            return cls(**json.loads((directory / _ABOUT).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{directory}: holds no gradient ({error}); save one with `megarl compare-gradients RUN N --save DIR`"
            ) from error


def add_compare_gradients(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `compare-gradients` to the commands of a parser."""
    command = commands.add_parser(
        "compare-gradients", help="compare a recorded batch's gradient under two settings, runs or commits"
    )
    command.add_argument("run_dir", type=Path, metavar="RUN", help="the run that recorded the batch")
    command.add_argument("step", type=int, metavar="N", help="the step whose batch it is")
    command.add_argument("overrides", nargs="*", help="settings of both gradients")
    command.add_argument("--b", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the second gradient")
    command.add_argument("--b-run", type=Path, metavar="RUN", help="take settings and weights of the second from a run")
    command.add_argument("--save", type=Path, metavar="DIR", help="only write the gradient, to a new directory")
    command.add_argument("--against", type=Path, metavar="DIR", help="compare with a saved gradient")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> None:
    from megarl.bisect.gradients import compare_gradients
    from megarl.host.activity import shown
    from megarl.record.text_table import align
    from megarl.weights.safetensors_headers import model_files
    from megarl.weights.safetensors_map import map_model

    has_other = bool(arguments.b) or arguments.b_run is not None
    if has_other + (arguments.save is not None) + (arguments.against is not None) != 1:
        raise ConfigError("megarl compare-gradients: name one of --b or --b-run, --save, --against")
    if arguments.save is not None and arguments.save.exists():
        raise ConfigError(f"--save: {arguments.save} exists; name a new directory")
    with tempfile.TemporaryDirectory(prefix="megarl-gradients-") as scratch:
        first, second = Path(scratch) / "a", Path(scratch) / "b"
        with shown():
            _compute(arguments, arguments.run_dir, [], first)
            if has_other:
                _compute(arguments, arguments.b_run or arguments.run_dir, arguments.b, second)
        if arguments.save is not None:
            shutil.copytree(first, arguments.save)
            return print_lines(f"wrote {arguments.save}")
        if arguments.against is not None:
            first, second = arguments.against, first
        abouts = [_About.read(each) for each in (first, second)]
        if abouts[0].batch != abouts[1].batch:
            raise ConfigError(f"{first} is the gradient of another batch; compare gradients of one RUN and N")
        dtype = "bfloat16" if "bfloat16" in {each.dtype for each in abouts} else abouts[0].dtype
        found = compare_gradients(*(map_model(model_files(each)) for each in (first, second)), dtype=dtype)
    if arguments.json:
        told = {**asdict(found), "verdict": found.verdict, "words": found.words(), "num_rows": abouts[0].num_rows}
        print(json.dumps(told, indent=1))
    else:
        rows = [("group", "norm a", "norm b", "cosine", "largest difference")]
        rows += [
            (g.name, f"{g.norms[0]:.4g}", f"{g.norms[1]:.4g}", f"{g.cosine:.8f}", f"{g.size:.1e}") for g in found.groups
        ]
        print_lines(*align(rows), "", f"{abouts[0].num_rows} rows of step {arguments.step}", found.words())
    if found.verdict == "fault":
        raise SystemExit(EXIT_FAILED)


def _compute(arguments: argparse.Namespace, run_dir: Path, overrides: list[str], out: Path) -> None:
    """Compute a gradient with settings and weights of a run."""
    from megarl.config.load import saved_config, with_overrides
    from megarl.config.setting import needing_trust
    from megarl.record.checkpoints import checkpoint_dir, complete_steps, read_checkpoint
    from megarl.record.metrics import RunPaths
    from megarl.run.session_inputs import open_session_inputs

    paths, step = RunPaths(run_dir), arguments.step
    config = saved_config(paths.saved_tree())
    if found := [key for key, _ in needing_trust(config)]:
        raise ConfigError(f"{paths.config}: {', '.join(found)} name what would run here; remove them there")
    # Neither prompts nor files of the run's own directory.
    own = replace(config.run, dir=str(out.parent), name=f"{out.name}_run")
    config = replace(config, data=replace(config.data, train=(), val=()), run=own)
    config = with_overrides(config, [*arguments.overrides, *overrides])
    if config.actor.lora is not None:
        raise ConfigError("actor.lora: compare-gradients compares the gradients of all weights; set actor.lora=null")
    earlier = [each for each in complete_steps(paths.checkpoints) if each < step]
    checkpoint = read_checkpoint(checkpoint_dir(paths.checkpoints, earlier[-1])) if earlier else None
    batch = recorded_batch(RunPaths(arguments.run_dir), step)
    inputs = open_session_inputs(config, with_engines=False, with_reference=False)
    write_gradient(inputs, checkpoint, batch, out, step=step)


def recorded_batch(paths: "RunPaths", step: int) -> "Collected":
    """Return the samples of a step that a run has recorded with their rewards."""
    from megarl.record.rollouts import read_rollouts
    from megarl.rollout.replay import read_record, record_path
    from megarl.train.collect import Collected
    from megarl.types import Reward, RolloutBatch

    tokens, judged = record_path(paths.records, step), paths.rollouts(step)
    if not tokens.is_file() or not judged.is_file():
        raise DataError(
            f"{paths.root}: has no tokens and rewards of step {step}, expected {tokens.name} in records and in "
            "rollouts; record them with rollout.record=true logging.rollout_every_steps=1 logging.num_rollouts=1000000"
        )
    rewards = {(r.uid, r.sample_index): Reward(score=r.reward, correct=r.correct) for r in read_rollouts(judged)}
    batch = read_record(tokens)
    samples = tuple(each for each in batch.samples if (each.uid, each.sample_index) in rewards)
    return Collected(
        rollout=RolloutBatch(prompts={each.uid: batch.prompts[each.uid] for each in samples}, samples=samples),
        rewards=[rewards[each.uid, each.sample_index] for each in samples],
    )


def write_gradient(
    inputs: "SessionInputs", checkpoint: "Checkpoint | None", batch: "Collected", out: Path, *, step: int
) -> None:
    """Start a trainer, and write the gradient of the run's algorithm on a batch as Hugging Face tensors in float32.

    Old log-probs are those of the weights that it has: of the checkpoint, or of model.path.
    """
    from megarl.cluster import offloading
    from megarl.record.metrics import Timers
    from megarl.run.session_parts import open_parts
    from megarl.train.forward import ForwardStage, needed_quantities, with_advantages
    from megarl.train.passes import RoleUpdater
    from megarl.train.rows import training_rows
    from megarl.types import FinishReason, scored_batch
    from megarl.types.messages import Role
    from megarl.types.seeds import batch_seed
    from megarl.weights.safetensors_map import create_model_files, weight_specs

    config = inputs.config
    with contextlib.ExitStack() as stack:
        parts = open_parts(stack, inputs, with_engines=False)
        if checkpoint is not None:
            parts.load(checkpoint.path, weights_only=True)
        algorithm, seed = inputs.algorithm, batch_seed(config.run.seed, step)
        state, actor = algorithm.initial_state(), parts.passes[Role.ACTOR]
        assert isinstance(actor, RoleUpdater)
        training = training_rows(batch, config.algo)
        needed = needed_quantities(algorithm, config.algo, staleness=0, num_updates=1, gate_passed=False)
        forward = ForwardStage(passes=parts.passes, hints=None, enter=parts.memory.enter, timers=Timers())
        rows, _ = forward.add_quantities(training.rows, batch.rollout.prompts, needed, seed=seed, step=step)
        cut = [reason is FinishReason.LENGTH for reason in training.finish_reasons]
        scored = scored_batch(rows, training.rewards, truncated=cut, step=step, seed=seed)
        rows = with_advantages(rows, algorithm.advantages(scored, state))
        parts.memory.enter(offloading.accumulating(Role.ACTOR, actor.spec.memory))
        actor.accumulate(rows, state, algorithm, step=step)
        files = create_model_files(out, weight_specs(inputs.spec, "float32"))
        parts.workers.store_weights(files, gradients=True)
    digest = hashlib.sha256(b"".join(row.token_ids.tobytes() for row in rows)).hexdigest()
    about = _About(batch=digest, num_rows=len(rows), dtype=config.model.dtype)
    (out / _ABOUT).write_text(json.dumps(asdict(about)), encoding="utf-8")
