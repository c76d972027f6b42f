"""Scripts that `megarl slurm submit` writes, and what it refuses."""

import contextlib
import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.errors import ConfigError, WorkerError
from megarl.launch.submit import NodesRequest, SubmitRequest, job_script, seconds_of, submit
from megarl.record.performance import StopForecast

REPOSITORY = Path(__file__).parents[3]
SMALL = REPOSITORY / "configs" / "run" / "sums-rl.yaml"
# 32 devices: TP 8, PP 2, DP 2.
REQUEST = SubmitRequest(
    command="train",
    config=REPOSITORY / "configs" / "run" / "gsm8k-qwen3-32b.yaml",
    overrides=("run.name=two words",),
    nodes=NodesRequest(
        num_nodes=4, gpus_per_node=8, cpus_per_node=96, sbatch_options=("--partition=gpu", "--account=me")
    ),
    time_limit="2-00:00:00",
    signal_s=900,
    max_restarts=5,
)
SPLIT = ("placement.mode=split", "placement.offload=false", "rollout.engine.num_engines=2", "rollout.engine.tp=8")


@pytest.mark.parametrize(
    ("signal_s", "refused", "warned"),
    # A step of 400 s, of which 250 s are sampling, and a checkpoint of 100 s.
    [(500, False, False), (499, False, True), (250, False, True), (249, True, False)],
)
def test_a_signal_after_which_a_step_and_a_checkpoint_do_not_end_is_refused_or_warned_of(
    signal_s: int, refused: bool, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = StopForecast(step=400.0, uncut=150.0, checkpoint=100.0)
    request = replace(REQUEST, signal_s=signal_s, forecast=lambda _: stop)
    said = f"--signal-s: got {signal_s}, but a step of this run is expected to take 400 s"
    with pytest.raises(ConfigError, match=f"{said}.*set --signal-s=540") if refused else contextlib.nullcontext():
        job_script(request)
    assert (f"warning: {said}" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("option", "refused"),
    # 96 CPUs and 8 GPUs to a node, which needs 128 GiB.
    [
        ("--mem=127G", "127 GiB"),
        ("--mem=128G", None),
        ("--mem=0", None),
        ("--mem=131071", "128 GiB"),
        ("--mem-per-cpu=1G", "96 GiB"),
        ("--mem-per-cpu=1366M", None),
        ("--mem-per-gpu=15G", "120 GiB"),
        ("--mem-per-gpu=16g", None),
    ],
)
def test_less_memory_than_a_node_needs_is_refused(option: str, refused: str | None) -> None:
    host = {"the offloaded trainer": 100 << 30, "a checkpoint in the making": 28 << 30, "Ray's object store": 0}
    stop = StopForecast(step=1.0, uncut=1.0, checkpoint=1.0, host=host)
    request = replace(REQUEST, nodes=replace(REQUEST.nodes, sbatch_options=(option,)), forecast=lambda _: stop)
    said = (
        f"^--sbatch: got {option}, {refused} of a node's memory, but this run needs at least 128 GiB: 100 for the "
        "offloaded trainer, 28 for a checkpoint in the making; ask for more"
    )
    with pytest.raises(ConfigError, match=said) if refused else contextlib.nullcontext():
        job_script(request)


@pytest.mark.parametrize(
    ("options", "engines"),
    [(("-p gpu",), ()), ((), ()), (("-p gpu",), ("--partition=small",)), (("-p gpu",), ("-p small",))],
)
def test_slurm_checks_a_job_and_its_partitions_first(
    options: tuple[str, ...], engines: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dry runs too; many a Slurm takes a job above its partition's limit, and never starts it."""
    _fake_sbatch(tmp_path, f"echo $@ >> {tmp_path}/log; cat > /dev/null; echo 'Job 7 to start' >&2")
    _fake(tmp_path / "sinfo", "echo 'gpu infinite'; echo 'small* 1-00:00:00'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    split = NodesRequest(num_nodes=2, gpus_per_node=8, cpus_per_node=32, sbatch_options=engines)
    request = replace(REQUEST, nodes=replace(REQUEST.nodes, sbatch_options=options))
    if engines:
        request = replace(request, overrides=(*REQUEST.overrides, *SPLIT), engine_nodes=split)
    said = "--time: got 2-00:00:00, but jobs in the partition small may take 1-00:00:00; lower it"
    with pytest.raises(ConfigError, match=f"^{said}$") if engines or not options else contextlib.nullcontext():
        submit(request, dry_run=True)
    assert (tmp_path / "log").read_text() == "--test-only\n"


def test_a_mistake_in_env_sh_is_told_before_the_job_waits_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it runs here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megarl.launch.submit.slurm_says", lambda *_, **__: pytest.fail("it was submitted"))
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/env.sh").write_text("touch mark\nif true; then\n")
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match=r"^slurm/env\.sh: line 3: syntax error.*; correct it, and submit again$"):
            submit(REQUEST, dry_run=dry_run)
    assert not (tmp_path / "mark").exists()


def test_the_command_line_asks_the_forecast_and_goes_on_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["slurm", "submit", f"--config={REQUEST.config}", "--nodes=4", "--dry-run", "--signal-s=60"]
    with pytest.raises(SystemExit):
        main(command)
    assert "error: --signal-s: got 60, but a step" in capsys.readouterr().err
    # On a login node without the model's config.json, for example.
    main([*command, "model.path=/nowhere", "model.config_path=null"])
    assert "warning: --signal-s=60: is not checked, as model.path" in capsys.readouterr().err


def test_a_script_has_the_options_and_quotes_the_arguments() -> None:
    script = job_script(REQUEST)
    for option in (
        "--nodes=4",
        "--gpus-per-node=8",
        "--cpus-per-task=96",
        "--time=2-00:00:00",
        "--signal=B:USR1@900",
        "--partition=gpu",
        "--account=me",
    ):
        assert script.count(f"#SBATCH {option}\n") == 1
    last = script.splitlines()[-1]
    assert last == (
        f"exec megarl slurm run --max-restarts=5 -- train {REQUEST.config} 'run.name=two words' "
        "placement.trainer.num_nodes=4 --resume"
    )
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_spare_nodes_are_asked_for_and_kept_when_others_are_lost() -> None:
    """The run is laid out for the nodes without them."""
    script = job_script(replace(REQUEST, num_spares=2))
    assert "#SBATCH --nodes=6\n" in script
    assert "#SBATCH --no-kill\n" in script
    assert script.splitlines()[-1].endswith("placement.trainer.num_nodes=4 --resume")
    assert "no-kill" not in job_script(REQUEST)
    for wrong in (
        replace(REQUEST, num_spares=-1),
        replace(REQUEST, num_spares=1, overrides=SPLIT, engine_nodes=replace(REQUEST.nodes, num_nodes=2)),
    ):
        with pytest.raises(ConfigError, match="--spare-nodes: got"):
            job_script(wrong)


def test_nodes_without_gpus_ask_for_none() -> None:
    one = replace(_with_nodes(REQUEST, num_nodes=1, gpus_per_node=0), config=SMALL)
    assert "gpus-per-node" not in job_script(one)


@pytest.mark.parametrize("option", ["--gres=gpu:8", "--gres=gpu:h100:8", "--gres=gpu:nvidia_h100_80gb:8(S:0-1),nvme:1"])
def test_sites_that_know_gpus_by_gres_alone_get_no_other_option(option: str) -> None:
    script = job_script(_with_nodes(REQUEST, sbatch_options=(option,)))
    assert f"#SBATCH {option}\n" in script
    assert "gpus-per-node" not in script
    with pytest.raises(ConfigError, match=r"^--sbatch: got 8 GPUs per node by --gres, but --gpus-per-node=4 or"):
        job_script(_with_nodes(REQUEST, sbatch_options=(option,), gpus_per_node=4))
    assert "gpus-per-node=8" in job_script(_with_nodes(REQUEST, sbatch_options=("--gres=nvme:4",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_nodes": 3},
            "--nodes: got 3 with 8 GPUs each, but the run needs 32 GPUs (4 nodes) for placement.trainer; change",
        ),
        ({"num_nodes": 5}, "the 32 processes of placement.trainer do not divide evenly over 5 nodes"),
        (
            {"gpus_per_node": 4, "num_nodes": 8},
            "actor.layout.tp: got 8, but of the nodes there are 8 with 4 GPUs each, and tensor parallelism over the",
        ),
        ({"num_nodes": 0}, "expected at least 1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_nodes_that_cannot_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        job_script(_with_nodes(REQUEST, **change))


@pytest.mark.parametrize(
    ("time_limit", "message"),
    [
        ("00:30:00", "--time: got 00:30:00 (1800 s), but the last checkpoint begins --signal-s=900 s"),
        ("soon", "--time: got 'soon', expected Slurm's form"),
    ],
)
def test_times_that_cannot_fit_are_refused(time_limit: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        job_script(replace(REQUEST, time_limit=time_limit))


def _with_nodes(request: SubmitRequest, **change: Any) -> SubmitRequest:
    return replace(request, nodes=replace(request.nodes, **change))


def test_servers_of_judges_have_nodes_of_their_own() -> None:
    """32 trainer GPUs on 4 nodes, 4 replicas of 4 GPUs on 2 more; supervised training starts none."""
    servers = "rewards.judge_servers={big: {model: m, replicas: 4, tp: 4}}"
    judge = "rewards.judges={style: {server: big}}"
    request = _with_nodes(replace(REQUEST, overrides=(servers, judge, "rewards.manager=judge")), num_nodes=6)
    assert "placement.trainer.num_nodes=4 rewards.judge_servers.big.num_nodes=2" in job_script(request)
    with pytest.raises(ConfigError, match=r"4 nodes\) for placement.trainer, 16 GPUs \(2 nodes\) for rewards.judge_se"):
        job_script(_with_nodes(request, num_nodes=4))


def test_split_placement_has_nodes_for_engines() -> None:
    """32 trainer GPUs on 4 nodes, 2 engines of 8 on 2 more."""
    request = _with_nodes(replace(REQUEST, overrides=SPLIT), num_nodes=6)
    assert "placement.trainer.num_nodes=4 placement.engines.num_nodes=2" in job_script(request)
    with pytest.raises(ConfigError, match=r"32 GPUs \(4 nodes\) for placement.trainer, 16 GPUs \(2 nodes\) for"):
        job_script(_with_nodes(request, num_nodes=4))


def test_engines_on_nodes_of_another_kind_make_a_heterogeneous_job() -> None:
    """32 trainer GPUs on 4 nodes of 8; 2 engines of 8 devices on 2 nodes more, of another partition."""
    engines = NodesRequest(num_nodes=2, gpus_per_node=8, cpus_per_node=32, sbatch_options=("--partition=small",))
    script = job_script(replace(REQUEST, overrides=SPLIT, engine_nodes=engines))
    trainer, _, other = script.partition("#SBATCH hetjob\n")
    for option in ("--nodes=4", "--cpus-per-task=96", "--signal=B:USR1@900", "--time=2-00:00:00", "--partition=gpu"):
        assert trainer.count(f"#SBATCH {option}\n") == 1
    component, _, body = other.partition("set -euo pipefail\n")
    assert [line for line in component.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=32",
        "#SBATCH --mem=0",
        "#SBATCH --partition=small",
    ]
    assert "placement.trainer.num_nodes=4 placement.engines.num_nodes=2 --resume" in body
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(
    ("overrides", "change", "message"),
    [
        ((), {}, "--engine-nodes: is set, but only with placement.mode=split"),
        (SPLIT, {"num_nodes": 1}, "--engine-nodes: got 1 with 8 GPUs each, but the run needs 16 GPUs (2 nodes) for"),
        (SPLIT, {"gpus_per_node": 4, "num_nodes": 4}, "rollout.engine.tp: got 8, but of the nodes there are 4 with 4"),
        (SPLIT, {"num_nodes": 3}, "--engine-nodes: the 16 processes of placement.engines do not divide evenly over 3"),
    ],
    ids=["colocated", "too few", "too small", "uneven"],
)
def test_engine_nodes_that_cannot_fit_are_refused(
    overrides: tuple[str, ...], change: dict[str, int], message: str
) -> None:
    engines = replace(NodesRequest(num_nodes=2, gpus_per_node=8, cpus_per_node=32), **change)
    with pytest.raises(ConfigError, match=re.escape(message)):
        job_script(replace(REQUEST, overrides=overrides, engine_nodes=engines))


ENVIRONMENTS = NodesRequest(num_nodes=2, gpus_per_node=0, cpus_per_node=16, sbatch_options=("--partition=cpu",))


def test_environments_on_nodes_of_their_own_are_the_last_component() -> None:
    """Slurm keeps a job that has lost one of them if every component has several nodes and says so."""
    engines = NodesRequest(num_nodes=2, gpus_per_node=8, cpus_per_node=32)
    request = replace(REQUEST, overrides=("environment.hosts=32",), environment_nodes=ENVIRONMENTS)
    more = replace(request, overrides=(*request.overrides, *SPLIT), engine_nodes=engines)
    for each, num_components in ((request, 2), (more, 3)):
        *earlier, last = job_script(each).split("#SBATCH hetjob\n")
        component, _, body = last.partition("set -euo pipefail\n")
        assert [line for line in component.splitlines() if line.startswith("#SBATCH")] == [
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --cpus-per-task=16",
            "#SBATCH --mem=0",
            "#SBATCH --partition=cpu",
            "#SBATCH --no-kill",
        ]
        assert len(earlier) == num_components - 1
        assert all("#SBATCH --no-kill\n" in each for each in earlier)
        assert " environment.nodes=2 --resume" in body
    one = replace(request, overrides=(), environment_nodes=replace(ENVIRONMENTS, num_nodes=1))
    of_engines = replace(more, engine_nodes=replace(engines, num_nodes=1, gpus_per_node=16))
    assert ["--no-kill" in job_script(each) for each in (one, of_engines)] == [False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"overrides": ("environment.hosts=33",)},
            "environment.hosts: got 33 on 2 node(s), up to 17 on each, but a node",
        ),
        ({}, "environment.nodes: got 2 with environment.hosts=1, so that a node would have nothing to do; raise"),
        (
            {"environment_nodes": None, "overrides": ("environment.nodes=2", "environment.hosts=2")},
            "environment.nodes: got 2, but the job has no nodes for environments; submit it with --environment-nodes=2",
        ),
        ({"command": "sft"}, "--environment-nodes: is set, but sft has no environments; remove it"),
        ({"num_spares": 1}, "--spare-nodes: got 1, expected at least 0, and none with --engine-nodes or --environ"),
    ],
    ids=["too few CPUs", "idle nodes", "no such nodes", "another command", "spares"],
)
def test_environment_nodes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        job_script(replace(REQUEST, **{"environment_nodes": ENVIRONMENTS, **change}))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("01:30", 90),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("1-01:30", 91800),
        ("1-00:00:30", 86430),
    ],
)
def test_time_limits_as_slurm_reads_them(limit: str, seconds: int) -> None:
    assert seconds_of(limit) == seconds


def test_jobs_of_a_chain_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    _fake_sbatch(tmp_path, f'echo "$@" >> {log}; cat > /dev/null; echo $((40 + $(wc -l < {log})))')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert submit(replace(REQUEST, num_jobs=3)) == [41, 42, 43]
    assert log.read_text().splitlines() == [
        "--parsable",
        "--parsable --dependency=afterany:41",
        "--parsable --dependency=afterany:42",
    ]


def test_what_slurm_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_sbatch(tmp_path, "echo 'invalid partition specified: gpu' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(WorkerError, match="sbatch refused the job: invalid partition specified: gpu"):
        submit(REQUEST)


def test_a_job_that_is_submitted_within_another_has_nothing_of_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask of CPUs would bind its ranks to a few; numbers that differ end its srun. Slurm's settings stay."""
    of_job = {
        "SLURM_JOB_ID": "9",
        "SLURM_CPU_BIND": "mask_cpu:0xF",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_MEM_PER_CPU": "1",
    }
    of_job |= {"SLURM_TRES_PER_TASK": "cpu=4", "PMIX_RANK": "0", "PMI_RANK": "0"}
    of_user = {"SLURM_CONF": "/etc/own.conf", "SLURM_JWT": "token", "SBATCH_ACCOUNT": "me", "MEGARL_VENV": "/v"}
    for name, value in (of_job | of_user).items():
        monkeypatch.setenv(name, value)
    # A real sinfo would look for those settings for a minute.
    _fake(tmp_path / "sinfo", "exit 1")
    _fake_sbatch(tmp_path, f"env > {tmp_path}/env; cat > /dev/null; echo 7")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert submit(REQUEST) == [7]
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    assert {name: seen.get(name) for name in of_user} == of_user
    assert not seen.keys() & of_job.keys()


@pytest.mark.parametrize("printed", ["7", "7;west", "NOTE: 3 hours are left\n7;west", "sbatch: Note 5\n7\nbye"])
def test_the_number_of_a_job_is_found_among_notes_of_the_site(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "printed").write_text(f"{printed}\n")
    _fake_sbatch(tmp_path, f"cat > /dev/null; cat {tmp_path}/printed")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert submit(REQUEST) == [7]


def test_a_login_without_slurm_is_told_what_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        WorkerError, match="sbatch refused the job: sbatch: No such file or directory; load Slurm's module"
    ):
        submit(REQUEST)


def test_a_job_needs_its_environment_where_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"slurm/env\.sh: no such file in .*; copy it with `cp -r .*/slurm \.`"):
        submit(REQUEST)


def _fake_sbatch(directory: Path, body: str) -> None:
    _fake(directory / "sbatch", body)


def _fake(script: Path, body: str) -> None:
    script.write_text(f"#!/bin/bash\n{body}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    "name",
    [
        "a\n#SBATCH --wrap=id",
        "a\r",
        "\x1b[2J",
        "a\u2028b",
        "-x",
        "%j",
        "a'b",
        '"',
        "$(id)",
        "`id`",
        "a;b",
        "a\\g<0>",
        "a ",
        ".",
    ],
)
def test_names_that_are_more_than_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: got .*, expected a single directory name of letters, digits"):
        job_script(replace(REQUEST, overrides=(f"run.name={json.dumps(name)}",)))


@pytest.mark.parametrize("name", ["two words", "größe=3, lr~1e-5", "数学_v2.1 (b)", "a@b+c"])
def test_any_other_name_is_one_word_of_its_line(name: str) -> None:
    script = job_script(replace(REQUEST, overrides=(f"run.name={json.dumps(name)}",)))
    (line,) = (line for line in script.splitlines() if "--job-name" in line)
    assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--job-name={name}"]


@pytest.mark.parametrize("option", ["--partition=a\nid", "id", "--comment=a\x1b[2J", ""])
def test_an_option_of_sbatch_is_one_line(option: str) -> None:
    with pytest.raises(ConfigError, match=r"--sbatch: got .*, expected an option of sbatch in one line"):
        job_script(_with_nodes(REQUEST, sbatch_options=(option,)))


def test_any_path_is_one_argument_of_the_command(tmp_path: Path) -> None:
    """What bash makes of the script's last line is the command line, whatever the name of the run file holds."""
    config = tmp_path / 'it\'s "a"\n$(id) `id` \\g<0> #.yaml'
    config.write_bytes(SMALL.read_bytes())
    prompt = "data.train=['a b\nc.parquet']"
    request = _with_nodes(replace(REQUEST, config=config, overrides=(prompt,)), num_nodes=1, gpus_per_node=0)
    last = job_script(request).partition("exec megarl ")[2]
    shown = subprocess.run(["bash", "-c", f"printf '%s\\0' {last}"], capture_output=True, text=True, check=True).stdout
    assert shown.split("\0")[:6] == ["slurm", "run", "--max-restarts=5", "--", "train", str(config)]
    assert shown.split("\0")[6] == prompt
