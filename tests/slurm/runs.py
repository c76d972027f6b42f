"""Runs that a job of the lab works on."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.kill_resume import MEGARL, SmallRun
from tests.helpers.rewriting import NOTES
from tests.helpers.waiting import wait_until
from tests.slurm.lab import CPUS_PER_NODE, SlurmLab

REPOSITORY = Path(__file__).parents[2]
# Two replicas of one rank each: on two nodes one each.
TWO_RANKS = ("actor.layout.tp=1", "actor.layout.sequence_parallel=false", "actor.layout.dp=2")
QUICK = (
    "sft.batch_size=4",
    "sft.total_steps=10",
    "trainer.total_steps=2",
    "cluster.object_store_mib=100",
    "cluster.start_timeout_s=90",
    "checkpoint.async_save=false",
)
# What slurm/env.sh is told.
VENV = {"MEGARL_VENV": str(Path(sys.executable).parents[1])}
# From an event to the line in the job's log that names it.
NOTICED_S = 10.0
# Slurm starts no job faster than this, and a busy machine needs longer for everything.
JOB_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRun(SmallRun):
    """A small run, and the nodes that it uses."""

    nodes: int = 2
    more: Sequence[str] = ()

    @property
    def arguments(self) -> list[str]:
        placed = [*QUICK, *TWO_RANKS, f"placement.trainer.num_nodes={self.nodes}", *self.more]
        # A property of a slotted base class, which `super()` does not find.
        return [*SmallRun.arguments.fget(self), *placed]  # type: ignore[attr-defined]

    @property
    def output(self) -> Path:
        return self.inputs / f"{self.name}.out"

    def log(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def submit(self, lab: SlurmLab, *options: str, script: str = "train", max_restarts: int = 2) -> int:
        """Give the run to the lab; returns the job's id."""
        given = [a for a in self.arguments[len(MEGARL) + 1 :] if a != "--resume"]
        exports = {"MEGARL_COMMAND": self.command, "MEGARL_MAX_RESTARTS": str(max_restarts)}
        return lab.sbatch(
            REPOSITORY / "slurm" / f"{script}.sbatch",
            *given,
            # Not the script's 600 s, which are the whole limit here.
            options=[*job_options(self.nodes, self.output), "--signal=B:USR1@60", *options],
            cwd=REPOSITORY,
            exports=VENV | exports | {NOTES: str(self.notes)},
        )


def job_options(nodes: int, output: Path) -> list[str]:
    """What the scripts ask of a cluster with GPUs, for the lab."""
    size = [f"--nodes={nodes}", "--gpus-per-node=0", f"--cpus-per-task={CPUS_PER_NODE}", "--mem=1000"]
    return [*size, "--time=10", f"--output={output}"]


def finish_here(run: SlurmRun) -> None:
    """The same run without Slurm."""
    assert run.start().wait() == 0, run.paths.root.with_suffix(".log").read_text()


def mid_run(run: SlurmRun, *, after: int = 2) -> None:
    """Wait until a job is in the middle of its training."""

    num_errors = run.log().count("error:")

    def arrived() -> bool:
        assert run.log().count("error:") <= num_errors, run.log()
        return run.last_step() >= after

    wait_until(arrived, f"step {after} of {run.name}", timeout_s=JOB_S, seen=run.log)


def noticed(run: SlurmRun, text: str) -> None:
    """What has just happened is named in the job's log in time."""
    wait_until(lambda: text in run.log(), f"{text!r} in the log", timeout_s=NOTICED_S, seen=run.log)


def left_behind(lab: SlurmLab, *, name: str = "megarl", file: str = "") -> list[str]:
    """Processes and files of megarl on the nodes, or only those with these in their names."""
    processes = [f"{node}: process {pid}" for node in lab.nodes for pid in lab.processes(node, name=name)]
    return processes + [f"{node}: {found}" for node in lab.nodes for found in lab.files(node) if file in found]
