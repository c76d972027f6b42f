"""A run that was stopped and killed ends as if nothing had happened."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megarl.host.exit_codes import EXIT_STOPPED
from megarl.host.janitor import RUN_ID_VARIABLE, RunScope
from megarl.launch.status import read_status
from megarl.record.checkpoints import complete_steps, last_checkpoint
from megarl.rollout.replay import read_record
from megarl.train.collect import SAMPLES_FILE
from tests.helpers.kill_resume import SmallRun, differences, make_inputs
from tests.helpers.killed import kill
from tests.helpers.talk import talk_settings
from tests.helpers.waiting import wait_until

SETTINGS = ("trainer.total_steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=1")
START_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("resume"))


@contextmanager
def started(run: SmallRun) -> Iterator[subprocess.Popen[bytes]]:
    """The driver; a test that fails leaves none behind."""
    process = run.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish(run: SmallRun) -> int:
    with started(run) as process:
        return process.wait()


def wait_for_step(run: SmallRun, step: int, process: subprocess.Popen[bytes]) -> None:
    wait_until(
        lambda: run.last_step() >= step, f"step {step}", timeout_s=START_TIMEOUT_S, seen=run.last_step, process=process
    )


def scope_of(process: subprocess.Popen[bytes]) -> RunScope:
    """The names that the run of this driver may use."""
    children = psutil.Process(process.pid).children(recursive=True)
    (run_id,) = {child.environ().get(RUN_ID_VARIABLE) for child in children} - {None}
    return RunScope(run_id=run_id)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "more", [(), (*talk_settings(), "rollout.max_response_tokens=128")], ids=["answers", "conversations"]
)
def test_a_stopped_and_killed_run_equals_an_uninterrupted_one(inputs: Path, more: tuple[str, ...]) -> None:
    """Float32, two tensor-parallel ranks: metrics and exported weights are equal bit for bit."""
    settings = (*SETTINGS, *more)
    reference = SmallRun(inputs=inputs, name=f"reference{len(more)}", settings=settings)
    assert finish(reference) == 0
    updates = [record.metrics for record in reference.records() if "actor/grad_norm" in record.metrics]
    # There is something to lose: gradients, a coefficient that moves, a learning rate that follows a schedule.
    assert all(metrics["actor/grad_norm"] > 0 for metrics in updates)
    for name in ("actor/lr", "actor/entropy"):
        assert len({metrics[name] for metrics in updates}) == 6

    run = SmallRun(inputs=inputs, name=f"interrupted{len(more)}", settings=settings)
    with started(run) as process:
        wait_for_step(run, 1, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == EXIT_STOPPED
    stopped = last_checkpoint(run.paths.checkpoints)
    assert stopped is not None
    assert stopped.state.step == run.last_step() < 6

    # A checkpoint that a kill left half-written is newer, and ignored.
    torn = run.paths.checkpoints / "step_000099"
    torn.mkdir()
    (torn / "state.json").write_text("{")
    with started(run) as process:
        wait_for_step(run, stopped.state.step + 1, process)
        assert kill(process).leftovers == ()

    assert finish(run) == 0
    assert differences(run, reference) == []
    assert complete_steps(run.paths.checkpoints) == [6]
    assert not torn.exists()
    lines = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/lr" in line["metrics"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_a_supervised_run_continues_under_another_layout(inputs: Path) -> None:
    """Two tensor-parallel ranks until the signal, one rank after it: losses are equal to float32 rounding."""
    steps = ("sft.total_steps=6", "sft.batch_size=8")
    reference = SmallRun(inputs=inputs, name="sft-reference", command="sft", settings=steps)
    assert finish(reference) == 0

    portable = (*steps, "checkpoint.portable=true")
    run = SmallRun(inputs=inputs, name="sft-stopped", command="sft", settings=portable)
    with started(run) as process:
        wait_for_step(run, 1, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == EXIT_STOPPED
    assert 1 <= run.last_step() < 6
    one_rank = ("actor.layout.tp=1", "actor.layout.sequence_parallel=false")
    assert finish(SmallRun(inputs=inputs, name=run.name, command="sft", settings=(*steps, *one_rank))) == 0

    assert [record.step for record in run.records()] == [1, 2, 3, 4, 5, 6]
    for got, expected in zip(run.records(), reference.records(), strict=True):
        for name in ("actor/loss", "actor/grad_norm"):
            assert got.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5)


@pytest.mark.long
def test_a_supervised_run_stopped_within_an_epoch_equals_an_uninterrupted_one(inputs: Path) -> None:
    """Two epochs of 64 rows in steps of 24, so that the third step ends one and begins the other: bit for bit."""
    settings = (
        *("sft.total_epochs=2", "sft.batch_size=24", "sft.val_every_steps=2"),
        f"sft.val=[{inputs / 'data' / 'sft.parquet'}]",
    )
    reference = SmallRun(inputs=inputs, name="epochs", command="sft", settings=settings)
    assert finish(reference) == 0
    assert [record.step for record in reference.records() if "actor/lr" in record.metrics] == [1, 2, 3, 4, 5]
    assert [record.step for record in reference.records() if "val/sft/nll" in record.metrics] == [0, 2, 4, 5]

    run = SmallRun(inputs=inputs, name="epochs-stopped", command="sft", settings=settings)
    for signum, num_steps in ((signal.SIGTERM, 1), (signal.SIGKILL, 3)):
        with started(run) as process:
            wait_for_step(run, num_steps, process)
            if signum == signal.SIGKILL:
                kill(process)
            else:
                process.send_signal(signum)
                assert process.wait() == EXIT_STOPPED
    assert finish(run) == 0
    assert differences(run, reference) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_stopped_while_it_samples_equals_an_uninterrupted_one(inputs: Path) -> None:
    """The step does not go on to its end, and its finished samples are not sampled again: bit for bit."""
    rows = ("trainer.prompts_per_step=32", "rollout.num_samples=16", "algo.kl.horizon=1000", "checkpoint.every_steps=0")
    settings = ("trainer.total_steps=5", *rows)
    reference = SmallRun(inputs=inputs, name="sampled", settings=settings)
    assert finish(reference) == 0
    run = SmallRun(inputs=inputs, name="sampling", settings=settings)
    with started(run) as process:
        wait_for_step(run, 1, process)
        wait_until(
            lambda: (read_status(run.paths.root).phase or "").startswith("generating: "),
            "samples of step 2",
            timeout_s=START_TIMEOUT_S,
            process=process,
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait() == EXIT_STOPPED
    stopped = last_checkpoint(run.paths.checkpoints)
    assert stopped is not None
    assert stopped.state.step == run.last_step() == 1
    saved = read_record(stopped.path / SAMPLES_FILE).samples
    assert 0 < len(saved) < 512
    assert finish(run) == 0
    assert differences(run, reference) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_stopped_while_it_validates_equals_an_uninterrupted_one(inputs: Path) -> None:
    """The checkpoint does not wait for the validation, which the resumed run does in its place: bit for bit."""
    settings = (
        *(
            "trainer.total_steps=3",
            "validation.every_steps=2",
            "validation.num_samples=512",
            "checkpoint.every_steps=0",
        ),
    )
    reference = SmallRun(inputs=inputs, name="validated", settings=settings)
    assert finish(reference) == 0
    assert [record.step for record in reference.records()] == [0, 1, 2, 2, 3, 3]
    run = SmallRun(inputs=inputs, name="validating", settings=settings)
    with started(run) as process:
        wait_for_step(run, 2, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == EXIT_STOPPED
    assert [record.step for record in run.records()] == [0, 1, 2]
    assert finish(run) == 0
    assert differences(run, reference) == []


@pytest.mark.long
def test_a_second_signal_ends_the_run_at_once(inputs: Path) -> None:
    # The horizon of the KL controller grows with the rows of a step.
    rows = ("trainer.prompts_per_step=32", "rollout.num_samples=16", "algo.kl.horizon=1000")
    run = SmallRun(inputs=inputs, name="twice", settings=("trainer.total_steps=100", *rows))
    with started(run) as process:
        wait_for_step(run, 0, process)
        scope = scope_of(process)
        # More often than twice: signals that arrive together count as one.
        while process.poll() is None:
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
    assert process.returncode == 128 + signal.SIGUSR1
    assert complete_steps(run.paths.checkpoints) == []
    assert scope.leftovers() == []
    assert scope.processes() == []
