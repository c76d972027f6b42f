"""`megarl plan-async`: costs that a made-up run has by construction, splits, advice, and runs that say too little."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from megarl.cli import main
from megarl.config.load import dump, with_overrides
from megarl.config.schema import Config
from megarl.errors import ConfigError, DataError
from megarl.record.metrics import JsonlSink, MetricsRecord, RunPaths
from megarl.record.rollouts import RolloutRecord, write_rollouts
from megarl_lab.schedules.async_fit import MeasuredRun, fit_non_negative, measure
from megarl_lab.schedules.plan_async import plan_async, plan_lines, splits
from megarl_lab.schedules.simulate import Costs, GroupLengths, Workload

# Two devices train and one engine decodes: 10 ms per step, 0.5 ms per sequence in it; 0.2 s + 40 µs per token to train
# on 2 devices; 0.1 s to sync. Steps differ in their lengths; those of step 1, which compiles, fit nothing.
LENGTHS = {1: (90.0, 500.0), 2: (100.0, 300.0), 3: (120.0, 250.0), 4: (110.0, 420.0), 5: (140.0, 380.0)}
NUM_SAMPLES, PROMPT = 32, 20.0


def step_metrics(step: int, *, counted: bool, staleness: int = 0) -> dict[str, float]:
    mean, longest = LENGTHS[step]
    num_response, num_tokens = NUM_SAMPLES * mean, NUM_SAMPLES * (mean + PROMPT)
    recomputed = 100.0 * step if staleness else 0.0
    busy_s = 0.01 * longest + 0.0005 * num_response + 0.00002 * recomputed
    gen_s = 50.0 if step == 1 else (0.0 if staleness else busy_s)
    update_s = 0.00003 * num_tokens
    step_s = gen_s + 0.2 + 0.00004 * num_tokens + 0.1
    metrics = {
        "timing_s/step": step_s,
        "timing_s/gen": gen_s,
        "timing_s/sync": 0.1,
        "timing_s/update_actor": update_s,
        "perf/tokens_per_s": num_tokens / step_s,
        "response_length/mean": mean,
        "response_length/max": longest,
        "prompt_length/mean": PROMPT,
    }
    if counted:
        counters = {"steps": longest, "sequences": num_response, "busy_s": busy_s, "idle_s": 0.0}
        metrics |= {f"perf/engine_{name}": value for name, value in counters.items()}
        metrics["perf/recomputed_tokens"] = recomputed
    if staleness:
        metrics["timing_s/old_log_prob"] = 0.000012 * num_tokens
        metrics["timing_s/step"] += metrics["timing_s/old_log_prob"]
        metrics["perf/tokens_per_s"] = num_tokens / metrics["timing_s/step"]
    return metrics


def make_run(root: Path, *overrides: str, counted: bool = True, staleness: int = 0, num_steps: int = 5) -> Path:
    paths = RunPaths(root)
    root.mkdir()
    settings = (
        "trainer.prompts_per_step=8",
        "rollout.num_samples=4",
        "rollout.engine.max_num_seqs=64",
        "actor.layout.dp=2",
        f"rollout.schedule.staleness={staleness}",
    )
    paths.config.write_text(dump(with_overrides(Config(), [*settings, *overrides])))
    receiver = JsonlSink(paths.metrics)
    receiver.write(MetricsRecord(step=0, time_s=0.0, metrics={"val/test_score/sums": 0.5}))
    for step in range(1, num_steps + 1):
        metrics = step_metrics(step, counted=counted, staleness=staleness)
        receiver.write(MetricsRecord(step=step, time_s=float(step), metrics=metrics))
    receiver.close()
    # The first file is of the first half of the run, and does not count.
    for step, lengths in ((1, {"p": [999]}), (5, {"p": [5, 10, 20, 40], "q": [7]})):
        write_rollouts(paths.rollouts(step), [rollout(step, uid, n) for uid, many in lengths.items() for n in many])
    return root


def rollout(step: int, uid: str, num_response: int) -> RolloutRecord:
    texts: Mapping[str, str] = dict.fromkeys(
        ("data_source", "prompt", "response", "ground_truth", "finish_reason"), "x"
    )
    return RolloutRecord(
        step=step,
        uid=uid,
        sample_index=0,
        reward=0.0,
        num_prompt_tokens=20,
        num_response_tokens=num_response,
        **texts,
    )


def test_costs_are_those_of_the_counted_steps(tmp_path: Path) -> None:
    measured = measure(make_run(tmp_path / "run"))
    assert dataclasses.asdict(measured.costs) == pytest.approx(
        {
            "decode_step_s": 0.01,
            "decode_sequence_s": 0.0005,
            "max_num_seqs": 64,
            # A third of an update of 30 µs on 2 devices.
            "recompute_s": 0.00002,
            "train_step_s": 0.2,
            "train_token_s": 0.00008,
            "old_logprobs_token_s": 0.00002,
            "sync_s": 0.1,
        }
    )
    assert measured.workload == Workload(
        prompts_per_step=8,
        num_samples=4,
        groups=(GroupLengths(prompt=20, responses=(5, 10, 20, 40)), GroupLengths(prompt=20, responses=(7,))),
    )
    assert [note.split(":")[0] for note in measured.notes] == [
        "recomputing after an update",
        "old log-probs of updates in flight",
    ]


def test_the_time_of_a_step_is_that_of_the_steps_whose_lengths_count(tmp_path: Path) -> None:
    """Of steps 2 to 5 the later two: a run whose responses grow is compared with what it has become."""
    later = [step_metrics(step, counted=True)["timing_s/step"] for step in (4, 5)]
    assert measure(make_run(tmp_path / "run")).step_s == pytest.approx(sum(later) / 2)


def test_without_counters_decoding_is_estimated_from_the_longest_and_from_all_tokens(tmp_path: Path) -> None:
    measured = measure(make_run(tmp_path / "run", counted=False))
    assert measured.costs.decode_step_s == pytest.approx(0.01)
    assert measured.costs.decode_sequence_s == pytest.approx(0.0005)
    assert measured.notes[0].startswith("decoding: estimated from timing_s/gen")


def test_a_run_in_flight_recomputes_log_probs(tmp_path: Path) -> None:
    measured = measure(make_run(tmp_path / "run", staleness=2))
    assert measured.costs.decode_step_s == pytest.approx(0.01)
    assert measured.costs.decode_sequence_s == pytest.approx(0.0005)
    assert measured.costs.recompute_s == pytest.approx(0.00002)
    # Scoring is not part of the 0.2 s + 40 µs per token: a synchronous run would not do it.
    assert measured.costs.train_step_s == pytest.approx(0.2)
    assert measured.costs.train_token_s == pytest.approx(0.00008)
    assert measured.costs.old_logprobs_token_s == pytest.approx(0.000024)
    assert [note.split(":")[0] for note in measured.notes] == ["recomputing after an update"]


def test_a_forward_pass_that_every_step_does_is_part_of_training(tmp_path: Path) -> None:
    """Two optimizer steps need old log-probs whatever the schedule: 40 + 12 µs per token."""
    measured = measure(make_run(tmp_path / "run", "trainer.mini_batch_prompts=4", staleness=2))
    assert measured.costs.train_token_s == pytest.approx(0.000104)
    assert measured.costs.old_logprobs_token_s == 0.0


def test_a_synchronous_run_with_old_log_probs_is_compared_with_one_that_does() -> None:
    """10 s of decoding, 10 s of training, 14 tokens of 0.5 s to score: one step off needs no scoring."""
    costs = dataclasses.replace(COSTS, old_logprobs_token_s=0.5)
    plan = plan_async(dataclasses.replace(measured_by(costs, 10), has_old_logprobs=True), num_devices=2, staleness=[1])
    assert {c.schedule: c.outcome.step_s for c in plan.choices} == pytest.approx(
        {"synchronous": 27.0, "one step off": 10.0, "in flight, staleness 1": 17.0}
    )
    assert (plan.itself.step_s, plan.colocated.step_s) == pytest.approx((27.0, 23.5))


def test_a_run_in_flight_without_counters_says_too_little(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"got no perf/engine_steps, .*staleness=2, whose timing_s/gen says only"):
        measure(make_run(tmp_path / "run", counted=False, staleness=2))


@pytest.mark.parametrize(
    ("columns", "y", "expected"),
    [
        # 1·x = y, exactly.
        ([[1.0], [2.0]], [2.0, 4.0], [2.0]),
        # Unconstrained: (3, −1). The first column alone: 2.5, with residual 0.5; the second alone: 2, with residual 9.
        ([[1.0, 0.0], [1.0, 1.0]], [3.0, 2.0], [2.5, 0.0]),
        # A second column that says the same as the first is not used.
        ([[1.0, 2.0], [2.0, 4.0]], [3.0, 6.0], [3.0, 0.0]),
        ([[1.0], [1.0]], [-1.0, -2.0], [0.0]),
    ],
)
def test_fit_non_negative(columns: list[list[float]], y: list[float], expected: list[float]) -> None:
    assert fit_non_negative(np.array(columns), np.array(y)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_devices", "per_engine", "per_replica", "expected"),
    [
        (2, 1, 1, [(1, 1)]),
        (8, 1, 1, [(7, 1), (6, 2), (5, 3), (4, 4), (3, 5), (2, 6), (1, 7)]),
        # Eighths of 64 only; engines of 16 devices leave three of them.
        (64, 16, 8, [(48, 16), (32, 32), (16, 48)]),
        # No eighths fit: all that there are.
        (6, 1, 2, [(4, 2), (2, 4)]),
        (2, 1, 2, []),
    ],
)
def test_splits(num_devices: int, per_engine: int, per_replica: int, expected: list[tuple[int, int]]) -> None:
    assert splits(num_devices, per_engine=per_engine, per_replica=per_replica) == expected


def measured_by(costs: Costs, *lengths: int) -> MeasuredRun:
    workload = Workload(
        prompts_per_step=1, num_samples=len(lengths), groups=(GroupLengths(prompt=4, responses=lengths),)
    )
    return MeasuredRun(config=Config(), costs=costs, workload=workload, step_s=25.0, has_old_logprobs=False, notes=())


COSTS = Costs(
    decode_step_s=1.0,
    decode_sequence_s=0.0,
    max_num_seqs=8,
    recompute_s=0.0,
    train_step_s=10.0,
    train_token_s=0.0,
    old_logprobs_token_s=0.0,
    sync_s=0.0,
)


def test_the_least_stale_of_the_fastest_is_recommended() -> None:
    """10 s of decoding and 10 s of training: 20 s in turn, 10 s side by side, however much staleness."""
    plan = plan_async(measured_by(COSTS, 10), num_devices=2, staleness=[1, 2])
    assert plan.colocated.step_s == pytest.approx(20.0)
    assert {c.schedule: c.outcome.step_s for c in plan.choices} == pytest.approx(
        {
            "synchronous": 20.0,
            "one step off": 10.0,
            "in flight, staleness 1": 10.0,
            "in flight, staleness 2": 10.0,
        }
    )
    best = plan.recommended()
    assert best is not None
    assert (best.schedule, best.devices) == ("one step off", (1, 1))
    lines = list(plan_lines(plan))
    # The run itself was synchronous, and took 25 s.
    assert "check      the run itself took 25 s per step, its simulation 20 s (-20%)" in lines
    assert "recommended: one step off, trainer:engines 1:1 (×2.00):" in lines
    assert "num_engines=1 rollout.schedule.staleness=1 rollout.schedule.on_update=finish" in lines[-2]


def test_a_run_that_gains_nothing_stays_as_it_is() -> None:
    """100 s of training on one device, or 50 s on both, after 10 s of decoding: 60 s together, 100 s beside."""
    costs = dataclasses.replace(COSTS, train_step_s=0.0, train_token_s=100 / 14)
    plan = plan_async(measured_by(costs, 10), num_devices=2, staleness=[1])
    assert plan.colocated.step_s == pytest.approx(60.0)
    assert min(choice.outcome.step_s for choice in plan.choices) == pytest.approx(100.0)
    assert plan.recommended() is None
    assert "stay synchronous and colocated" in list(plan_lines(plan))[-1]


@pytest.mark.parametrize(
    ("num_devices", "staleness", "window_frac", "message"),
    [
        (1, [1], 0.0, "got 1 devices"),
        (2, [0], 0.0, "--staleness 0"),
        (2, [1], 1.5, "--window-frac 1.5"),
    ],
)
def test_senseless_choices(num_devices: int, staleness: list[int], window_frac: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_async(measured_by(COSTS, 10), num_devices=num_devices, staleness=staleness, window_frac=window_frac)


def test_the_command_prints_a_table_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    main(["plan-async", str(run), "--devices", "4", "--staleness", "2", "--window-frac", "0.5"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("on 4 devices, simulated from its own metrics; nothing was started")
    assert lines[1].startswith("decode     10 ms per step + 0.5 ms per sequence in it, up to 64; 20 µs")
    table = [line for line in lines if " / " in line]
    # Replicas of the trainer have one device, engines too: 3:1, 2:2 and 1:3 by three schedules, and the colocated one.
    assert len(table) == 1 + 3 * 3
    assert table[0].split()[:2] == ["synchronous", "colocated"]
    assert "×1.00" in table[0]
    assert (run / "plan_async.png").read_bytes().startswith(b"\x89PNG")
    assert lines[-1] == f"wrote {run / 'plan_async.png'}"


def error_of(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(["plan-async", str(run)])
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_directory_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"no metrics at {tmp_path}/metrics.jsonl" in error_of(tmp_path, capsys)


def test_a_run_of_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "got 1 steps of training" in error_of(make_run(tmp_path / "run", num_steps=1), capsys)


def test_a_run_without_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    for file in (run / "rollouts").iterdir():
        file.unlink()
    assert "got no rollouts, expected those from which lengths are drawn" in error_of(run, capsys)


def test_metrics_without_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (run / "config.yaml").unlink()
    assert "is not a run directory" in error_of(run, capsys)
