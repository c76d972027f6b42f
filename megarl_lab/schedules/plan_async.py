"""Compare ways to split devices between trainer and engines, by simulation from what a run measured, and print them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from megarl.config.generation import ScheduleConfig
from megarl.errors import ConfigError
from megarl.host.streams import print_lines
from megarl.record.text_table import align
from megarl.report.style import INK, MUTED, color_of, figure_style, save_png
from megarl_lab.schedules.async_fit import MeasuredRun, measure
from megarl_lab.schedules.simulate import Setting, SimulatedOutcome, simulate

PICTURE = "plan_async.png"
# A faster setting is recommended over one with less staleness only if it saves more than this share of a step.
WORTH = 0.05
# A simulation measures at least this many steps, and this many groups.
LEAST_STEPS, LEAST_GROUPS = 8, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncChoice:
    """A simulated setting. schedule: its name. devices: those that train, and those of engines."""

    schedule: str
    devices: tuple[int, int]
    setting: Setting
    outcome: SimulatedOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPlan:
    """The simulated settings of a run, beside the colocated synchronous one with as many devices, and beside the run
    itself, whose measured time says how far simulations are off.
    """

    run: str
    num_devices: int
    measured: MeasuredRun
    itself: SimulatedOutcome
    colocated: SimulatedOutcome
    choices: tuple[AsyncChoice, ...]

    def recommended(self) -> AsyncChoice | None:
        """Return the choice of least staleness that is nearly as fast as the fastest; None: stay synchronous and
        colocated.
        """
        limit = min(choice.outcome.step_s for choice in self.choices) * (1 + WORTH)
        if self.colocated.step_s <= limit:
            return None
        fast = [choice for choice in self.choices if choice.outcome.step_s <= limit]
        return min(fast, key=lambda choice: (choice.outcome.lag_max, choice.outcome.step_s))


def print_async_plan(run_dir: Path, *, num_devices: int | None, staleness: Sequence[int], window_frac: float) -> None:
    """Print the plan of a run, and write its picture into the run's directory. Devices default to the run's own."""
    plan = plan_async(measure(run_dir), num_devices=num_devices, staleness=staleness, window_frac=window_frac)
    print_lines(*plan_lines(plan))
    draw(plan, run_dir / PICTURE)
    print_lines(f"wrote {run_dir / PICTURE}")


def plan_async(
    measured: MeasuredRun, *, num_devices: int | None, staleness: Sequence[int], window_frac: float = 0.0
) -> AsyncPlan:
    """Simulate a run with all splits of the devices: synchronous, one step off, and with each staleness in flight.

    num_devices: None for as many as the run had. window_frac: `rollout.schedule.window_frac` of settings in flight.
    """
    config = measured.config
    num_devices, per_engine = num_devices or _devices_of(measured), config.rollout.engine.num_workers
    if num_devices < 2 or min(staleness, default=0) < 1 or not 0 <= window_frac <= 1:
        raise ConfigError(
            f"got {num_devices} devices, --staleness {' '.join(map(str, staleness))} and --window-frac {window_frac}, "
            "expected at least 2 devices, staleness >= 1 and a share from 0 to 1; give others"
        )
    layout = config.actor.layout
    possible = splits(num_devices, per_engine=per_engine, per_replica=layout.world_size // layout.dp)
    if not possible:
        raise ConfigError(
            f"--devices: got {num_devices}, expected what can be split into engines of {per_engine} devices and "
            f"trainer replicas of {layout.world_size // layout.dp}; give more, or name a run with a smaller layout"
        )
    # A synchronous run computes old log-probs if this one does; one step off, the ratio is to the engines'.
    sync_has_old_logprobs = measured.has_old_logprobs and config.rollout.schedule.staleness == 0
    schedules = {"synchronous": (0, True, 1, sync_has_old_logprobs), "one step off": (1, True, 1, False)}
    for eta in staleness:
        window = ScheduleConfig(staleness=eta, window_frac=window_frac).window(config.trainer.prompts_per_step)
        schedules[f"in flight, staleness {eta}"] = (eta, False, window, True)
    # Small batches differ more from one another: more steps of them count.
    num_steps = max(LEAST_STEPS, -(-LEAST_GROUPS // config.trainer.prompts_per_step))
    choices = []
    for name, (eta, finish, window, has_old_logprobs) in schedules.items():
        for trainers, engines in possible:
            setting = Setting(
                num_engines=engines // per_engine,
                num_trainers=trainers,
                staleness=eta,
                finish=finish,
                window=window,
                has_old_logprobs=has_old_logprobs,
            )
            outcome = simulate(measured.workload, measured.costs, setting, num_steps=num_steps)
            choices.append(AsyncChoice(schedule=name, devices=(trainers, engines), setting=setting, outcome=outcome))
    together = Setting(
        num_engines=max(1, num_devices // per_engine), num_trainers=num_devices, has_old_logprobs=sync_has_old_logprobs
    )
    return AsyncPlan(
        run=config.run.name,
        num_devices=num_devices,
        measured=measured,
        itself=simulate(measured.workload, measured.costs, measured.setting, num_steps=num_steps),
        colocated=simulate(measured.workload, measured.costs, together, num_steps=num_steps),
        choices=tuple(choices),
    )


def splits(num_devices: int, *, per_engine: int, per_replica: int) -> list[tuple[int, int]]:
    """Return the splits to compare, each as (devices that train, devices of engines): eighths of the devices where
    replicas and engines fit into them, or else all that there are.

    per_engine: devices of an engine. per_replica: devices of a replica of the trainer.

    >>> splits(6, per_engine=1, per_replica=2)
    [(4, 2), (2, 4)]
    """
    possible = [
        (num_devices - engines, engines)
        for engines in range(per_engine, num_devices, per_engine)
        if (num_devices - engines) % per_replica == 0
    ]
    return [split for split in possible if split[1] * 8 % num_devices == 0] or possible


def plan_lines(plan: AsyncPlan) -> Iterator[str]:
    """Write the plan as lines of text: what was measured, a table, and what to set."""
    costs, workload = plan.measured.costs, plan.measured.workload
    lengths = [length for group in workload.groups for length in group.responses]
    yield f"plan of {plan.run} on {plan.num_devices} devices, simulated from its own metrics; nothing was started"
    yield (
        f"decode     {1000 * costs.decode_step_s:.4g} ms per step + {1000 * costs.decode_sequence_s:.4g} ms per "
        f"sequence in it, up to {costs.max_num_seqs}; {1e6 * costs.recompute_s:.4g} µs per recomputed token"
    )
    yield (
        f"train      {costs.train_step_s:.4g} s per step + {1e6 * costs.train_token_s:.4g} µs × devices per token; "
        f"with updates in flight {1e6 * costs.old_logprobs_token_s:.4g} more; sync {costs.sync_s:.4g} s"
    )
    yield (
        f"samples    {workload.prompts_per_step} × {workload.num_samples} per step; responses of {min(lengths)} to "
        f"{max(lengths)} tokens, {sum(lengths) / len(lengths):.4g} on average, from {len(lengths)} recorded ones"
    )
    yield from (f"estimate   {note}" for note in plan.measured.notes)
    took = plan.measured.step_s
    yield (
        f"check      the run itself took {took:.4g} s per step, its simulation {plan.itself.step_s:.4g} s "
        f"({plan.itself.step_s / took - 1:+.0%})"
    )
    yield ""
    yield from align(
        [
            ("schedule", "trainer:engines", "s/step", "speed-up", "trainer idle", "engines idle", "lag", "recomputed"),
            _cells("synchronous", "colocated", plan.colocated, plan.colocated),
            *(_cells(c.schedule, "{}:{}".format(*c.devices), c.outcome, plan.colocated) for c in plan.choices),
        ]
    )
    yield ""
    yield "lag: mean and maximum, in updates since admission; recomputed: tokens per step after updates in flight"
    best = plan.recommended()
    if best is None:
        yield f"recommended: stay synchronous and colocated; no split saves more than {WORTH:.0%} of a step"
        return
    trainers, engines = best.devices
    schedule = best.setting
    prompts = (schedule.staleness + 1) * workload.prompts_per_step
    frac = f" rollout.schedule.window_frac={schedule.window / prompts:.3g}" if schedule.window > 1 else ""
    yield (
        f"recommended: {best.schedule}, trainer:engines {trainers}:{engines} "
        f"(×{plan.colocated.step_s / best.outcome.step_s:.2f}):"
    )
    yield (
        f"  placement.mode=split rollout.engine.num_engines={schedule.num_engines} "
        f"rollout.schedule.staleness={schedule.staleness} "
        f"rollout.schedule.on_update={'finish' if schedule.finish else 'continue'}{frac}"
    )
    correction = "; staleness needs a correction, see configs/schedule" if schedule.staleness else ""
    yield f"  and an actor.layout of {trainers} ranks{correction}"


def draw(plan: AsyncPlan, path: Path) -> None:
    """Draw the step time over the devices of engines, a line per schedule."""
    with figure_style():
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        ax = figure.add_subplot()
        ax.set_title(f"Seconds per step on {plan.num_devices} devices, simulated", color=INK)
        ax.axhline(plan.colocated.step_s, color=MUTED, linestyle="--", label="synchronous, colocated")
        for index, schedule in enumerate(dict.fromkeys(choice.schedule for choice in plan.choices)):
            points = [(c.devices[1], c.outcome.step_s) for c in plan.choices if c.schedule == schedule]
            ax.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=color_of(index), label=schedule)
        ax.set_xlabel("devices of engines; the others train")
        ax.set_ylim(bottom=0)
        figure.legend(loc="outside right upper")
        save_png(figure, path)


def _devices_of(measured: MeasuredRun) -> int:
    engine, placement = measured.config.rollout.engine, measured.config.placement
    trainers = measured.config.actor.layout.world_size
    return trainers if placement.mode == "colocated" else trainers + engine.num_engines * engine.num_workers


def _cells(schedule: str, split: str, outcome: SimulatedOutcome, colocated: SimulatedOutcome) -> tuple[str, ...]:
    return (
        schedule,
        split,
        f"{outcome.step_s:.4g}",
        f"×{colocated.step_s / outcome.step_s:.2f}",
        f"{outcome.trainer_idle:.0%}",
        f"{outcome.engine_idle:.0%}",
        f"{outcome.lag_mean:.2f} / {outcome.lag_max}",
        f"{outcome.recomputed_tokens:,.0f}",
    )
