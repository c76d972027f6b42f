"""A run is killed again and again while its trackers fail and links lie among its checkpoints, and loses nothing."""

import hashlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megarl.record.checkpoints import checkpoint_dir, complete_steps, last_checkpoint
from megarl.record.metrics import MARKER
from tests.helpers.kill_resume import SmallRun, differences, draw_moment, kill_at, make_inputs

SEED, NUM_KILLS = 0, 30
# Longer than the few steps that one start makes before it is killed, and short enough that three runs or so finish.
NUM_STEPS = 15
SETTINGS = (
    "actor.layout={tp: 1, sequence_parallel: false}",
    "sft.batch_size=8",
    f"sft.total_steps={NUM_STEPS}",
    "checkpoint.keep_last=3",
    "logging.wandb_project=p",
    "logging.mlflow_experiment=p",
)
PACKAGES = ("wandb", "mlflow-skinny")


class FailingServer(BaseHTTPRequestHandler):
    """A tracker's server that says 503, does not answer for a while, or hangs up, at random."""

    rng, num_requests = random.Random(SEED), 0

    def _fail(self) -> None:
        type(self).num_requests += 1
        how = self.rng.choice(("busy", "silent", "closed"))
        if how == "busy":
            self.send_error(503)
        elif how == "silent":
            time.sleep(5)
        self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = _fail  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Tests have enough output."""


class QuietServer(ThreadingHTTPServer):
    """Runs that are killed hang up too."""

    daemon_threads, block_on_close = True, False

    def handle_error(self, *_: object) -> None: ...


@contextmanager
def failing_server() -> Iterator[str]:
    with QuietServer(("127.0.0.1", 0), FailingServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def trackers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of runs that have trackers' packages and a server that fails.

    The packages lie beside the environment, since none of them is a dependency, and behind it, whose own go first.
    """
    site, paths = (tmp_path_factory.mktemp(name) for name in ("site", "paths"))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", site, *PACKAGES], check=True)
    (paths / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(site)!r})\n")
    with failing_server() as url:
        yield {
            "PYTHONPATH": os.pathsep.join([str(paths), str(Path(__file__).parents[2])]),
            "WANDB_BASE_URL": url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_X_GRAPHQL_RETRY_MAX": "1",
            "WANDB_X_GRAPHQL_RETRY_WAIT_MAX_SECONDS": "1",
            "MLFLOW_TRACKING_URI": url,
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
        }


def put_away(run: SmallRun, archive: Path) -> None:
    """Move a checkpoint that is not the last to the archive, and leave a link, as users do who lack space."""
    checkpoints = [checkpoint_dir(run.paths.checkpoints, step) for step in complete_steps(run.paths.checkpoints)]
    if len(checkpoints) > 1 and not any(path.is_symlink() for path in checkpoints):
        away = archive / run.name / checkpoints[0].name
        if not away.exists():
            away.parent.mkdir(parents=True, exist_ok=True)
            checkpoints[0].rename(away)
            checkpoints[0].symlink_to(away)
        if not (nowhere := checkpoint_dir(run.paths.checkpoints, 0)).is_symlink():
            nowhere.symlink_to(archive / "unmounted")


def digests(directory: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_thirty_kills_with_failing_trackers_and_links_lose_nothing(tmp_path: Path, trackers: dict[str, str]) -> None:
    """The directory of checkpoints is a link, one of them leads to an archive and one nowhere. After each kill the last
    checkpoint is whole and at most two steps behind the metrics; runs that finish equal one that was not killed.
    """
    inputs, archive, rng = make_inputs(tmp_path), tmp_path / "archive", random.Random(SEED)
    run_of = partial(SmallRun, inputs=inputs, command="sft", settings=SETTINGS, environment=trackers)
    reference, run, began = run_of(name="reference"), run_of(name="killed0"), time.time()
    assert reference.start().wait() == 0
    # Trackers that do not answer then keep it for a minute.
    duration_s, kept = reference.records()[-1].time_s - began, dict[str, str]()
    num_kills = num_finished = 0
    print("| kill | run | moment | last step | whole | executing | gone s |")
    while num_kills < NUM_KILLS or run.paths.root.exists():
        checkpoints = run.paths.checkpoints
        if not run.paths.root.exists():
            elsewhere = tmp_path / "scratch" / run.name
            elsewhere.mkdir(parents=True)
            run.paths.root.mkdir(parents=True)
            checkpoints.symlink_to(elsewhere)
        process, moment = run.start(), draw_moment(rng, duration_s)
        killed = kill_at(process, run, moment) if num_kills < NUM_KILLS else None
        log = run.paths.root.with_suffix(".log")
        if killed is None:
            assert process.wait() == 0, log.read_text()
            assert differences(run, reference) == []
            num_finished += 1
            run = run_of(name=f"killed{num_finished}")
        else:
            num_kills += 1
            assert killed.leftovers == (), log.read_text()
            # Raises if it is damaged.
            last = last_checkpoint(checkpoints)
            whole = last.state.step if last else 0
            print(
                f"| {num_kills} | {run.name} | {moment.num_steps} steps + {moment.delay_s:.2f} s | {run.last_step()} | "
                f"{whole} | {', '.join(killed.executing)} | {killed.gone_s:.1f} |",
                flush=True,
            )
            # A step's checkpoint is written while the next step goes on, and complete at its end.
            assert whole >= run.last_step() - 2
            put_away(run, archive)
        assert kept.items() <= (kept := digests(archive)).items()
    assert num_finished > 1
    assert FailingServer.num_requests > NUM_KILLS
    assert any(name.endswith(MARKER) for name in kept)
