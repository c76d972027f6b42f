"""Mistakes are told in one line with the remedy, before anything is started: exit code 2."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import ELSEWHERE, main
from megarl.config.load import with_overrides
from megarl.config.mixture import RemoteConfig
from megarl.config.rewards import RewardsConfig
from megarl.config.schema import Config
from megarl.errors import (
    ConfigError,
    DataError,
    MismatchError,
    NonFiniteError,
    RunError,
    WeightSyncError,
    WorkerError,
)
from megarl.run.first_checks import unreached_servers
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, TaskFiles, generate
from tests.helpers.checkpoints import make_checkpoint

REPOSITORY = Path(__file__).parents[2]
TRAIN_FILE, SFT_FILE = (REPOSITORY / "configs" / "run" / f"sums-{kind}.yaml" for kind in ("rl", "sft"))


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    sizes = GenerateConfig(seed=0, num_sft=40, num_train=40, num_val=4)
    return generate(TASKS.get("sums"), tmp_path_factory.mktemp("sums"), sizes)


@pytest.fixture(scope="module")
def complete_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two safetensors files with an index."""
    model = make_checkpoint(tmp_path_factory.mktemp("model"), tied=False, max_shard_size="200KB")
    assert len(list(model.glob("*.safetensors"))) > 1
    return model


@pytest.fixture
def model(complete_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(complete_model, tmp_path / "model"))


@pytest.fixture(autouse=True)
def nothing_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster would be a failure."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a cluster was started")

    monkeypatch.setattr("megarl.cluster.cluster.Cluster", refuse)


@pytest.fixture
def settings(model: Path, sums: TaskFiles, tmp_path: Path) -> list[str]:
    data = [f"data.train=[{sums.train}]", f"data.val=[{sums.val}]", f"sft.train=[{sums.sft}]"]
    return [f"run.dir={tmp_path}/runs", "run.name=run", f"model.path={model}", *data]


@pytest.fixture
def error_of(settings: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command whose other settings are right; the one line that it prints."""

    def run(*overrides: str, command: str = "train", file: Path | None = None) -> str:
        with pytest.raises(SystemExit) as exit_info:
            main([command, str(file or (TRAIN_FILE if command == "train" else SFT_FILE)), *settings, *overrides])
        output = capsys.readouterr()
        assert exit_info.value.code == 2
        # A slow machine's command says every few seconds what it is doing.
        assert [line for line in output.out.splitlines() if not line.startswith("… ")] == []
        (line,) = output.err.splitlines()
        assert line.startswith("error: ")
        return line

    return run


def test_the_settings_are_right_but_for_the_mistake(
    model: Path, sums: TaskFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tests below would prove nothing: without a mistake the cluster is reached."""

    class ReachedError(BaseException):
        pass

    def reached(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr("megarl.cluster.cluster.Cluster", reached)
    data = [f"data.train=[{sums.train}]", f"data.val=[{sums.val}]", f"sft.train=[{sums.sft}]"]
    for command, file in (("train", TRAIN_FILE), ("sft", SFT_FILE)):
        with pytest.raises(ReachedError):
            main([command, str(file), f"run.dir={tmp_path}/runs", f"model.path={model}", *data])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor.optimiser.lr=1e-5", ["unknown key 'actor.optimiser'", "did you mean 'actor.optimizer'?"]),
        (
            "actor.layout.sequence_parallel=true",
            ["sequence_parallel: got true with tp=1", "set actor.layout.sequence_parallel=false"],
        ),
        ("rollout.top_p=0.9", ["rollout.top_p: got 0.9", "or rollout.top_p=1.0"]),
        ("rollout.top_k=1", ["rollout.top_k: got 1", "set it to at least 2"]),
        ("data.max_prompt_tokens=4", ["train.parquet row 0", "data.max_prompt_tokens"]),
        ("model.path=", ["model.path"]),
        ("rollout.source=replay", ["rollout.replay_dir", "rollout.record=true"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings(error_of: Callable[..., str], override: str, parts: list[str], tmp_path: Path) -> None:
    line = error_of(override)
    assert [part for part in parts if part not in line] == [], line
    # Nothing that a second try would meet.
    assert not (tmp_path / "runs").exists()


def test_missing_record_of_a_replay(error_of: Callable[..., str], tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step_00000{step}.parquet").touch()
    line = error_of("rollout.source=replay", f"rollout.replay_dir={tmp_path}")
    assert "step_000003.parquet does not exist; record it with rollout.record=true, or lower" in line
    assert not (tmp_path / "runs").exists()


def test_sft_is_checked_too(error_of: Callable[..., str], tmp_path: Path) -> None:
    assert "sft.train: is empty" in error_of("sft.train=[]", command="sft")
    assert "the demonstration has" in error_of("rollout.max_response_tokens=3", command="sft")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [("trian", "did you mean 'train'? "), ("resume", "that is `megarl train FILE --resume` here; ")],
)
def test_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str], command: str, said: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, str(TRAIN_FILE)])
    assert f"unknown command '{command}'; {said}expected one of: " in capsys.readouterr().err


def test_what_elsewhere_is_called_otherwise_names_commands_that_there_are() -> None:
    for words in (given.split() for given in ELSEWHERE.values()):
        *command, last = [word for word in words if word not in ("FILE", "--resume")]
        with pytest.raises(SystemExit, match="0"):
            main([*command, last, "--help"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--resume=latest", "takes no value 'latest'; leave it out"),
        ("--dry-run=yes", "argument --dry-run: takes no value 'yes'; leave it out"),
        ("--overide", "unrecognized arguments: --overide; did you mean '--overwrite'?; settings are given as"),
        # No beginning of an option stands for it.
        ("--over", "unrecognized arguments: --over"),
        ("--config=run.yaml", "unrecognized arguments: --config=run.yaml; a run file is given by its path alone"),
    ],
)
def test_an_option_that_there_is_not(capsys: pytest.CaptureFixture[str], given: str, said: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(TRAIN_FILE), given])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("run.dir=s3://bucket/runs", "run.dir: got 's3://bucket/runs'"),
        ("data.train=[https://a.example/x.parquet]", "data.train: got 'https://a.example/x.parquet'"),
        ("model.path=https://huggingface.co/Qwen/Qwen3-0.6B", "model.path: got 'https://huggingface.co/"),
    ],
)
def test_a_url_where_a_path_is_expected(error_of: Callable[..., str], tmp_path: Path, setting: str, key: str) -> None:
    line = error_of(setting)
    assert line.startswith(f"error: {key}")
    assert "expected a path: runs read and write files of this host alone" in line
    assert not Path("s3:").exists()


def test_a_directory_for_a_run_file(error_of: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "mine" / "run.yaml").parent.mkdir()
    (tmp_path / "mine" / "run.yaml").touch()
    said = error_of(file=tmp_path / "mine")
    assert said == f"error: {tmp_path}/mine is a directory, expected a file; {tmp_path}/mine has: run.yaml"


def test_no_run_file(error_of: Callable[..., str], tmp_path: Path) -> None:
    assert "sums-rl.yaml" in error_of(file=TRAIN_FILE.with_name("sums-grpo.yaml"))


def rows_of(sums: TaskFiles) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(sums.train).to_pylist()
    return rows


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_row_without_its_column(error_of: Callable[..., str], sums: TaskFiles, tmp_path: Path) -> None:
    rows = rows_of(sums)
    del rows[5]["prompt"]
    line = error_of(f"data.val=[{write_jsonl(tmp_path / 'bad.jsonl', rows)}]")
    assert f"{tmp_path}/bad.jsonl row 5" in line


def test_safetensors_missing(error_of: Callable[..., str], model: Path) -> None:
    for file in (*model.glob("*.safetensors"), model / "model.safetensors.index.json"):
        file.unlink()
    assert f"{model}/model.safetensors does not exist" in error_of()


def test_file_of_the_index_missing(error_of: Callable[..., str], model: Path) -> None:
    (gone := sorted(model.glob("*.safetensors"))[1]).unlink()
    assert f"{gone} does not exist" in error_of()


def test_tensor_missing(error_of: Callable[..., str], model: Path) -> None:
    file = sorted(model.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, file)
    assert f"missing ['{name}'] (1)" in error_of()


def test_tensor_misshapen(error_of: Callable[..., str], model: Path) -> None:
    file = next(f for f in model.glob("*.safetensors") if "model.norm.weight" in load_file(f))
    save_file({**load_file(file), "model.norm.weight": torch.ones(65)}, file)
    assert "model.norm.weight has shape (65,), config.json implies (64,)" in error_of()


def test_file_cut_off(error_of: Callable[..., str], model: Path) -> None:
    file = sorted(model.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:5])
    assert f"{file}: not a safetensors file: 5 bytes; copy the model again" in error_of()


def test_unknown_family(error_of: Callable[..., str], model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    line = error_of()
    assert "['MambaForCausalLM'] is not supported; known: " in line
    assert "Qwen3ForCausalLM" in line


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError, 2),
        (DataError, 2),
        (MismatchError, 1),
        (NonFiniteError, 1),
        (RunError, 1),
        (WeightSyncError, 1),
        (WorkerError, 1),
    ],
)
def test_exit_codes(
    error: type[Exception], exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("gloo said:\n  connection closed")

    monkeypatch.setattr("megarl.run.first_checks.check_start", fail)
    with pytest.raises(SystemExit) as exit_info:
        main(["train", str(TRAIN_FILE)])
    assert exit_info.value.code == exit_code
    assert capsys.readouterr().err == "error: gloo said: connection closed\n"


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["fails at the end", "fails in print"])
def test_a_reader_that_is_gone(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `| head`: no traceback, and the exit code of SIGPIPE."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "from megarl.host.exit_codes import exit_on_errors\nwith exit_on_errors():\n    print('text')"
    command = [sys.executable, *options, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, b"")


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_decides_the_exit_code(signum: int, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where Ray turns the SystemExit of a handler into one of its own, with code 1."""

    def interrupted(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signum)
        except SystemExit:
            raise SystemExit(1) from None

    monkeypatch.setattr("megarl.run.first_checks.check_start", interrupted)
    with pytest.raises(SystemExit) as exit_info:
        main(["train", str(TRAIN_FILE)])
    assert exit_info.value.code == exit_code
    assert signal.getsignal(signum) is signal.SIG_IGN


# Overrides of a working command, and what its one line must say. The files are those of `mistaken`.
FIRST_MISTAKES = (
    ("model.path=modle", "model.path: modle/config.json: no such file in {here}, .*; correct model.path"),
    ("model.path=adapters", "model.path: adapters holds adapters .* and no model; set .* actor.lora.path"),
    ("model.path=m.txt", "model.path: m.txt/config.json: Not a directory, expected .*; correct model.path"),
    ("logging.wandb_project=p", "logging.wandb_project: needs the package wandb, .*; run pip install wandb"),
    (
        "rollout.engine.kv_cache_mib=900000000",
        "kv_cache_mib: got 900000000, .* has [0-9,]+ MiB of memory for this process; lower it, or",
    ),
    ("run.dir=/proc/runs", "/proc/runs/run/.*: no directory can be made there; choose another one"),
    ("run.name=used", "used already holds a run; choose another run.name, or pass --resume or --overwrite"),
    ("data.train=[modle.jsonl]", "modle.jsonl: no such file in {here}, expected .*; check data.train"),
    ("data.train=[openai/gsm8k]", "openai/gsm8k: no such file in {here}, expected Parquet or JSON lines"),
    ("data.train=[t.csv]", "t.csv: got file type '.csv', expected one of: .jsonl, .parquet; convert it"),
    ("data.train=[t.jsonl]", "column 'prompt' is missing; there are: question; set data.prompt_key and data.label_key"),
    ("data.train=t.jsonl", "data.train: got 't.jsonl' .str., .*; put it in brackets, as in data.train=.t.jsonl."),
    ("rewards.custom.path=broken.py", "broken.py:1: not Python: expected ':' .*; correct it"),
    ("rewards.custom.path=named.py", "named.py: has no function 'reward_func', only mine; set its name"),
    ("trainer=null", "trainer: got null, expected a mapping; give its settings, or leave it out"),
    ("use.algo=grop", "use.algo: no file grop.yaml in .*; did you mean 'grpo'"),
    (
        "rewards.custom.path=needs.py",
        "needs.py:1: ModuleNotFoundError: No module named 'nosuchpackage'; install nosuch",
    ),
    ("rewards.custom.path=alien.py", "alien.py:2: reward_func: got the parameters .a., expected one of .*; rename one"),
    ("data.train=[empty.jsonl]", "the data set is empty .empty.jsonl.; expected at least one row"),
    ("data.val=[empty.jsonl]", "the data set is empty .empty.jsonl.; expected at least one row"),
    ("actor.layout={tp: 3}", "actor.layout.tp: got 3, which does not divide the model's num_attention_heads=4"),
    ("model.path=short", "short/.*.safetensors: tensor .* ends at byte .* of .*; copy the model again"),
    ("model.path=silent", "model.path: silent has no tokenizer_config.json; expected a model directory"),
    ("trainer.total_steps=-1", "trainer.total_steps: got -1, expected >= 0"),
    ("algo.policy_loss.name=ppo", "algo.policy_loss.name: unknown policy loss 'ppo'; .*expected one of: .*cispo, "),
    ("rollout.num_samples=1", "rollout.num_samples: got 1, expected >= 2: the .* estimator compares the samples"),
    ("algo.aggregation_horizon_tokens=5", "aggregation_horizon_tokens: got 5, which is not read with algo.aggreg"),
    ("trainer.prompts_per_step=99999", "trainer.prompts_per_step: got 99999, expected 1 to [0-9]+, .*; lower it, or"),
    ("environment.default=gues", "environment.default: unknown environment 'gues'; did you mean 'guess'"),
    ("environment.entries={x: {type: gues}}", "environment.entries.x.type: unknown environment 'gues'; .* 'guess'"),
    ("environment.default=gus.b:C", "environment.default: got gus.b:C, but there is no module gus; install it, or"),
    ("environment.entries={x: {type: gues.py:C}}", "gues.py: no such file in {here}, .*; correct .*entries.x.type"),
    ("data.val=[gues.jsonl]", "gues.jsonl row 1: environment: unknown environment 'gues'; did you mean 'guess'"),
    ("data.val=[poem.jsonl]", "poem.jsonl row 1: data_source: unknown data source 'poem'"),
    ("data.val=[mute.jsonl]", "mute.jsonl row 1: reward_model: ground_truth is missing"),
    ("data.val=[late.jsonl]", "late.jsonl row 5000: reward_model: ground_truth is missing"),
    ("environment.default=world:Fails", "environment.default: world does not load: RuntimeError: no key; correct it"),
    ("environment.default=here.py:Here", "environment.default: Here has no start; derive it from megarl.environm"),
    ("model.dtype=fp16", "model.dtype: got 'fp16' .str., expected one of .*; choose one of these"),
    ("model.dtype=bf16", "model.dtype: got 'bf16' .str., expected one of .*; did you mean 'bfloat16'"),
    ("actor.optimizer.lr=1e-6x", "actor.optimizer.lr: got '1e-6x' .str., expected a finite float; write a number, "),
    ("run.name=7", "run.name: got 7 .int., expected str; put it in quotes, as in '\"7\"'"),
    (
        "rewards={manager: judge, judges: {q: {endpoint: {urls: [http://j:1/v1], model: m, api_key_env: NO_KEY}}}}",
        "rewards.judges.q.endpoint.api_key_env: NO_KEY is not set; export the key",
    ),
    ("actor.layout={pp: 5}", "actor.layout: 2 layers do not split over pp=5 stages .*; choose another pp, or set"),
    ("data.val=[adapters.jsonl]", "adapters.jsonl: is a directory, expected Parquet or JSON lines; name the files"),
    ("trainer={total_steps: 4, total_epochs: 1}", "trainer.total_epochs: got 1 beside trainer.total_steps=4; leave"),
)
_ROW = {"prompt": "1+1=", "data_source": "math500", "reward_model": {"ground_truth": "2"}}


@pytest.fixture
def mistaken(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("short", "silent"):
        shutil.copytree(model, tmp_path / name)
    (tmp_path / "silent/tokenizer_config.json").unlink()
    weights = min((tmp_path / "short").glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 1)
    for name, text in {
        "adapters/adapter_config.json": "{}",
        "adapters.jsonl/m.txt": "",
        "m.txt": "",
        "runs/used/metrics.jsonl": "",
        "t.csv": "prompt\n1",
        "t.jsonl": '{"question": "1+1="}',
        "broken.py": "def reward_func()\n    return 1",
        "named.py": "raise SystemExit\ndef mine(): ...",
        "needs.py": "import nosuchpackage\ndef reward_func(queries, prompts, labels): return [1.0]",
        "world.py": "raise RuntimeError('no key')",
        "here.py": "class Here: ...",
        "late.jsonl": "\n".join([*[json.dumps(_ROW)] * 5000, json.dumps({**_ROW, "reward_model": {"style": "rule"}})]),
        "alien.py": "\ndef reward_func(a): return 1.0",
        "empty.jsonl": "",
        **{
            f"{name}.jsonl": "\n".join(map(json.dumps, (_ROW, {**_ROW, **wrong})))
            for name, wrong in {
                "gues": {"environment": "gues"},
                "poem": {"data_source": "poem"},
                "mute": {"reward_model": {"style": "rule"}},
            }.items()
        },
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Runs commands one after another; fails if one does not end by itself, or has imported what takes seconds.
TELL = """
import json, sys
from megarl.cli import main
from megarl.config.load import with_overrides
from megarl.config.mixture import RemoteConfig
from megarl.config.rewards import RewardsConfig
from megarl.config.schema import Config
sys.modules["wandb"] = None
for command in json.load(sys.stdin):
    try:
        main(command)
    except SystemExit as end:
        slow = {"torch", "transformers", "ray", "vllm", "megatron", "sympy"}
        print("exit", end.code, sorted(sys.modules.keys() & slow))
        print(file=sys.stderr)
"""


@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry run"])
def test_mistakes_are_told_before_libraries_load(dry: bool, settings: list[str], mistaken: Path) -> None:
    """Each with what was found and what to do. Plans need no files, and are made of what goes on."""
    mistakes = [
        (override, said)
        for override, said in FIRST_MISTAKES
        if not (dry and override.startswith(("run.name=used", "data.train=[modle", "data.train=[openai")))
    ]
    commands = [
        ["train", str(TRAIN_FILE), *settings, override, *(["--dry-run"] if dry else [])] for override, _ in mistakes
    ]
    require_told(commands, [said.replace("{here}", str(mistaken)) for _, said in mistakes])


def require_told(commands: Sequence[Sequence[str]], said: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TELL],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    ends = [line for line in done.stdout.splitlines() if not line.startswith("… ")]
    assert ends == ["exit 2 []"] * len(commands), done.stderr
    for command, expected, told in zip(commands, said, done.stderr.split("\n\n"), strict=False):
        assert re.search(expected, told), f"{command}: {told}"


def test_mistakes_of_plans_and_evaluations_likewise(mistaken: Path, model: Path) -> None:
    plan = ["plan", "--gpus", "8", "--model"]
    mistakes = {
        "--model: got 'qwen3-8bee', expected a directory": [*plan, "qwen3-8bee"],
        "unknown key 'actor.lauout'": [*plan, "qwen3-8b", "actor.lauout.tp=2"],
        "algo.policy_loss.name: unknown policy loss 'ppo'": [*plan, "qwen3-8b", "algo.policy_loss.name=ppo"],
        "no layout of qwen3-8b with actor.layout.tp as given": [*plan, "qwen3-8b", "actor.layout.tp=3"],
        "nomodel: not a model; expected": ["eval", "nomodel", "--data", "gues.jsonl", "--out", "out"],
        "nowhere.jsonl: no such file": ["eval", str(model), "--data", "nowhere.jsonl", "--out", "out"],
        "--k: got 9, expected 1 to": ["eval", str(model), "--k", "9", "--data", "gues.jsonl", "--out", "out"],
        "gues.jsonl row 1: environment: unknown": ["eval", str(model), "--data", "gues.jsonl", "--out", "out"],
    }
    for command in mistakes.values():
        if command[0] == "eval":
            command += ["data.max_prompt_tokens=64", "--max-response-tokens", "64"]
    require_told([*mistakes.values()], [*mistakes])


def test_a_disk_without_room_for_the_model(error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.run.first_checks.free_bytes", lambda _: 1000.0)
    assert re.search(
        "run.dir: .* the trained model alone takes .* MiB; free space there, or choose another", error_of()
    )


def test_console_script(tmp_path: Path) -> None:
    megarl = Path(sys.executable).with_name("megarl")
    done = subprocess.run(
        [megarl, "train", TRAIN_FILE, "trainer.total_step=4"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown key 'trainer.total_step'; did you mean 'trainer.total_steps'?")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def closed() -> Iterator[str]:
    """An address at which nobody listens, and nobody else may."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


CLOSED: dict[str, str] = {
    "cluster.address": "cluster.address={}",
    "rewards.remote.urls": "rewards={{manager: remote, remote: {{urls: ['http://{}/get_reward'], on_error: raise}}}}",
    "rewards.hybrid.parts.r.urls": "rewards={{manager: hybrid, hybrid: {{parts: {{r: {{manager: remote, urls: ['http://{}/r']}}}}}}}}",
    "rewards.judges.q.endpoint.urls": "rewards={{manager: judge, judges: {{q: {{endpoint: {{urls: ['http://{}/v1']}}}}}}}}",
    "teacher.servers": "teacher={{model_path: m, servers: ['http://{}/v1']}}",
    "teachers.t.writers": "teachers={{t: {{model_path: m, writers: ['http://{}/v1']}}}}",
}


@pytest.mark.parametrize("key", CLOSED)
def test_every_address_that_settings_name_is_tried_at_the_start(key: str, closed: str) -> None:
    """A job's own Ray may come up later, and of several servers one is enough."""
    config = with_overrides(Config(), [CLOSED[key].format(closed)])
    section = key.partition(".")[0]
    (mistake,), warnings = unreached_servers(config, [section])
    assert mistake.startswith(f"{key}: nobody accepts connections at ")
    assert f"{closed}" in mistake
    assert "(Connection refused); start that program first, or correct" in mistake
    assert warnings == []
    assert unreached_servers(config, []) == ([], [])


def test_of_several_servers_one_is_enough(closed: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = f"http://127.0.0.1:{listener.getsockname()[1]}/get_reward"
        remote = RemoteConfig(urls=(there, f"http://me:pw@{closed}/r"))
        config = replace(Config(), rewards=RewardsConfig(manager="remote", remote=remote))
        mistakes, (warning,) = unreached_servers(config, ["rewards"])
    assert mistakes == []
    assert "pw" not in warning
    assert warning.endswith("(Connection refused); the others get all requests")


def test_of_a_judge_behind_a_proxy_the_proxy_is_tried(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge on this host is asked directly all the same."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://me:pw@{closed}")
    key = "rewards.judges.q.endpoint.urls"
    (mistake,), warnings = unreached_servers(
        with_overrides(Config(), [CLOSED[key].format("judge.example")]), ["rewards"]
    )
    assert mistake.startswith(
        f"{key}: nobody accepts connections at http://***masked***@{closed} (Connection refused); "
    )
    assert mistake.endswith("; correct HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, which name it, or name hosts in NO_PROXY")
    assert warnings == []
    with socket.create_server(("127.0.0.1", 0)) as there:
        here = CLOSED[key].format(f"127.0.0.1:{there.getsockname()[1]}")
        assert unreached_servers(with_overrides(Config(), [here]), ["rewards"]) == ([], [])


def test_a_jobs_own_ray_and_judges_without_a_trial_are_not_waited_for(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_HOSTED_RUN", "1-0-1")
    judge = CLOSED["rewards.judges.q.endpoint.urls"].format(closed)
    config = with_overrides(Config(), [f"cluster.address={closed}", judge, "rewards.judges.q.dry_run=false"])
    assert unreached_servers(config, ["cluster", "rewards"]) == ([], [])


def test_a_closed_service_is_told_before_models_are_read(error_of: Callable[..., str], closed: str) -> None:
    began = time.monotonic()
    said = error_of(CLOSED["rewards.remote.urls"].format(closed))
    assert said.startswith("error: rewards.remote.urls: nobody accepts connections at http://127.0.0.1:")
    assert f"error: cluster.address: nobody accepts connections at {closed} " in error_of(f"cluster.address={closed}")
    assert time.monotonic() - began < 60.0
