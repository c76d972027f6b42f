"""What a job knows of the command that it runs."""

from pathlib import Path

import pytest

from megarl.cli import parse
from megarl.config.schema import ClusterConfig
from megarl.errors import ConfigError
from megarl.launch.command import JobCommand, read_command

RUN_FILE = str(Path(__file__).parents[3] / "configs" / "run" / "sums-rl.yaml")


def read(argv: list[str]) -> JobCommand:
    return read_command(argv, parse(argv))


def test_a_run_keeps_its_logs_in_its_directory() -> None:
    command = read(["train", RUN_FILE, "run.dir=/data/runs", "run.name=a", "cluster.num_cpus=4", "--resume"])
    assert command.logs == Path("/data/runs/a/logs")
    assert command.cluster.num_cpus == 4
    assert command.on("10.0.0.1:20000", ["a", "b"])[-2:] == ["cluster.address=10.0.0.1:20000", "cluster.hosts=[a, b]"]


def test_an_evaluation_keeps_them_beside_its_results() -> None:
    command = read(["eval", "/m", "--data", "a.parquet", "--out", "/results/e"])
    assert command.logs == Path("/results/e/logs")
    assert command.cluster == ClusterConfig()


def test_settings_of_an_evaluation_count() -> None:
    command = read(["eval", "/m", "--data", "a.parquet", "--out", "/e", "cluster.object_store_mib=100"])
    assert command.cluster.object_store_mib == 100


def test_commands_of_one_host_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got the command 'report', expected one of train, sft, .*, eval; "):
        read(["report", "/runs/a"])


@pytest.mark.parametrize("command", ["sft", "train-reward", "train-preference"])
def test_every_command_that_trains_runs_in_a_job(command: str) -> None:
    assert read([command, RUN_FILE, "run.dir=/data/runs", "run.name=a"]).logs == Path("/data/runs/a/logs")


def test_a_wrong_setting_is_found_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"actor\.layot"):
        read(["train", RUN_FILE, "actor.layot.tp=2"])
