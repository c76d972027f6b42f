"""What a job knows of the command that it runs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megarl.cli import parse
from megarl.cluster.object_store import object_store
from megarl.config.schema import ClusterConfig
from megarl.errors import ConfigError
from megarl.launch.allocation import HostGroup
from megarl.launch.command import JobCommand, read_command

RUN_FILE = str(Path(__file__).parents[3] / "configs" / "run" / "sums-rl.yaml")


def read(argv: list[str]) -> JobCommand:
    return read_command(argv, parse(argv))


def test_a_run_keeps_its_logs_in_its_directory() -> None:
    command = read(["train", RUN_FILE, "run.dir=/data/runs", "run.name=a", "cluster.num_cpus=4", "--resume"])
    assert command.logs == Path("/data/runs/a/logs")
    assert command.cluster.num_cpus == 4
    assert command.on("10.0.0.1:20000", components("a", "b"))[-2:] == [
        "cluster.address=10.0.0.1:20000",
        "cluster.hosts=[a, b]",
    ]


def test_an_evaluation_keeps_them_beside_its_results() -> None:
    command = read(["eval", "/m", "--data", "a.parquet", "--out", "/results/e"])
    assert command.logs == Path("/results/e/logs")
    assert command.cluster == replace(ClusterConfig(), object_store_mib=256)


def test_ray_gets_a_store_for_the_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 rows of 16,384 tokens: 256 MiB, and twice 21 bytes of each of 32 Mi tokens. Ray is the job's own."""
    monkeypatch.setattr("megarl.launch.command.object_store", partial(object_store, room=1 << 50))
    rows = ["trainer.prompts_per_step=256", "rollout.num_samples=8", "rollout.max_response_tokens=16000"]
    rows += ["trainer.mini_batch_prompts=null", "data.max_prompt_tokens=384", "cluster.address=10.0.0.1:6379"]
    assert read(["train", RUN_FILE, *rows]).cluster.object_store_mib == 256 + 2 * 32 * 21


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


SPLIT = ("placement.mode=split", "placement.trainer.num_nodes=2", "actor.layout.tp=1", "actor.layout.dp=2")


def components(*hosts: str) -> list[HostGroup]:
    """A component for each of the texts, with the hosts that it names."""
    return [HostGroup(hosts=tuple(names.split()), cpus_per_host=8) for names in hosts]


def test_components_of_a_heterogeneous_job_that_suit_a_run() -> None:
    """Two nodes for the trainer, one for the engine; a job of equal nodes may have any number of them."""
    run = read(["train", RUN_FILE, *SPLIT])
    assert run.num_nodes == {"placement.trainer.num_nodes": 2, "placement.engines.num_nodes": 1}
    run.check_components(components("h1 h2", "l5"))
    for argv in (["train", RUN_FILE, *SPLIT], ["train", RUN_FILE], ["sft", RUN_FILE, *SPLIT]):
        read(argv).check_components(components("h1 h2 h3"))


APART = ("environment.hosts=4", "environment.nodes=2")


@pytest.mark.parametrize(
    ("settings", "hosts"), [((), ["h1 h2", "c1 c2"]), (SPLIT, ["h1 h2", "l5", "c1 c2"]), (SPLIT, ["h1 h2 l5", "c1 c2"])]
)
def test_environments_have_the_last_component(settings: Sequence[str], hosts: list[str]) -> None:
    """A restart uses those of its nodes that are left; a job of equal nodes names none."""
    run, groups = read(["train", RUN_FILE, *settings, *APART]), components(*hosts)
    run.check_components(groups)
    assert run.environment_group(groups) is groups[-1]
    run.check_components(components("h1 h2 h3 c1 c2"))
    assert run.environment_group(components("h1 h2 h3 c1 c2")) is None
    lost = ([], ["c1"], ["c1", "c2"], ["h2"], ["c1", "h2"])
    assert [run.goes_on(groups, each) for each in lost] == [True, True, False, False, False]
    assert run.on("h1:7", [*groups[:-1], *components("c2")])[-1] == "environment.nodes=1"


@pytest.mark.parametrize(
    ("argv", "hosts", "message"),
    [
        (
            ["train", RUN_FILE, *APART],
            ["h1", "c1"],
            r"environment\.nodes: got 2, but component 1 .* has 1 node\(s\): c1; pass environment\.nodes=1, or",
        ),
        (["train", RUN_FILE, *APART], ["h1", "l5", "c1 c2"], "of 3 components, but a run uses 2 here"),
        (
            ["train", RUN_FILE],
            ["h1", "l5"],
            r"of 2 components, but a run uses 1 here: .*mode=split",
        ),
        (["sft", RUN_FILE, *SPLIT], ["h1 h2", "l5"], "of 2 components, but a run uses 1 here"),
        (["eval", "/m", "--data", "a.parquet", "--out", "/e"], ["h1", "l5"], "of 2 components, but a run uses 1"),
        (["train", RUN_FILE, *SPLIT], ["h1", "h2", "l5"], "of 3 components, but a run uses 2 here"),
        (
            ["train", RUN_FILE, *SPLIT],
            ["h1", "l5"],
            r"placement\.trainer\.num_nodes: got 2, but component 0 .* has 1 node\(s\): h1; pass \S+\.num_nodes=1",
        ),
        (
            ["train", RUN_FILE, *SPLIT],
            ["h1 h2", "l5 l6"],
            r"placement\.engines\.num_nodes: got 1, but component 1 .* has 2 node\(s\): l5, l6; pass \S+\.num_nodes=2",
        ),
    ],
    ids=["environments", "no engines", "colocated", "another command", "evaluation", "three", "trainer", "engines"],
)
def test_components_that_do_not_suit_a_run_are_refused(argv: list[str], hosts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(argv).check_components(components(*hosts))
