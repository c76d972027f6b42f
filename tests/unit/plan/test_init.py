"""`megarl init` writes a run file that passes the checks of a dry run, with the smallest replicas that fit."""

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import PACKAGED, load_config
from megarl.errors import ConfigError, DataError
from megarl.plan.init import InitRequest, ask_missing, init_run
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model


def request(directory: Path, *, model: str, gpus: int, algo: str = "grpo") -> InitRequest:
    path = str(PACKAGED / "model" / "hf" / model)
    return InitRequest(directory=directory, model=path, train=["t.parquet"], val=[], algo=algo, gpus=gpus)


@pytest.mark.parametrize(
    ("model", "gpus", "layout"),
    [
        # bfloat16 weights, float32 gradients and a distributed float32 optimizer state: 16.4 + 32.8 + 98.3 / 8 GB.
        ("qwen3-8b", 8, (1, 1, 8)),
        # 65.5 + 131 GB of weights and gradients do not fit into 86 GB; a quarter of them does.
        ("qwen3-32b", 32, (4, 1, 8)),
    ],
)
def test_the_first_layout_that_fits_is_taken(
    tmp_path: Path, model: str, gpus: int, layout: tuple[int, int, int]
) -> None:
    config = load_config(init_run(request(tmp_path / "first", model=model, gpus=gpus)))
    found = config.actor.layout
    assert (found.tp, found.pp, found.dp) == layout
    assert found.sequence_parallel == (found.tp > 1)
    assert config.rollout.engine.num_engines * config.rollout.engine.tp == gpus
    assert config.placement.trainer.num_nodes == gpus // 8
    assert (config.run.name, config.run.dir) == ("first", str(tmp_path / "first" / "runs"))


def test_a_run_on_cpu_has_one_rank_in_float32(tmp_path: Path) -> None:
    config = load_config(init_run(request(tmp_path, model="qwen3-0.6b", gpus=0, algo="cpo")))
    assert (config.model.dtype, config.actor.layout.world_size) == ("float32", 1)


def test_any_path_is_one_value(tmp_path: Path) -> None:
    directory = tmp_path / "it's: [a], #b" / "first"
    train = ["a, b]\nrun: {seed: 7}\n#.parquet", "- c", "true", "{d}"]
    config = load_config(init_run(replace(request(directory, model="qwen3-0.6b", gpus=0), train=train)))
    assert (config.run.dir, config.run.seed) == (str(directory / "runs"), 0)
    assert list(config.data.train) == train
    assert "train '" in (directory / "run.yaml").read_text().split("\n")[1]


def test_lengths_fit_the_models_context(tmp_path: Path) -> None:
    # A quarter of 512 for the question; 256 of the rest, of which a run on CPU takes no more.
    config = load_config(init_run(request(tmp_path, model=str(tiny_model(tmp_path)), gpus=0)))
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (128, 256)


@pytest.fixture
def own_data(tmp_path: Path) -> InitRequest:
    """Rows with columns and a data source that megarl does not know."""
    (tmp_path / "t.jsonl").write_text('{"question": "1+1=?", "answer": "2", "data_source": "mine"}\n' * 16)
    asked = request(tmp_path, model=str(tiny_model(tmp_path)), gpus=0)
    return replace(asked, train=[str(tmp_path / "t.jsonl")])


def test_usual_columns_are_found_and_a_refusal_writes_nothing(own_data: InitRequest) -> None:
    own_data = replace(own_data, directory=own_data.directory / "new" / "run")
    with pytest.raises(
        DataError, match=r"unknown data source 'mine'.*Nothing was written \(with --prompt-key question"
    ):
        init_run(own_data)
    assert not own_data.directory.parent.exists()
    Path(own_data.train[0]).write_text('{"question": "1+1=?", "answer": "2"}\n' * 16)
    file = init_run(replace(own_data, data_source="openai/gsm8k"))
    config = load_config(file)
    assert (config.data.prompt_key, config.data.label_key) == ("question", "answer")
    assert config.data.default_source == "openai/gsm8k"
    schema = re.match(r"# yaml-language-server: \$schema=(.+)\n", file.read_text())
    assert schema is not None
    assert "properties" in json.loads(Path(schema[1]).read_text())
    Path(own_data.train[0]).write_text('{"left": "1+1=?", "right": "2"}\n' * 16)
    with pytest.raises(
        DataError, match=r"column 'prompt' is missing.*--prompt-key and --label-key \(columns: left, right\)"
    ):
        init_run(replace(own_data, directory=own_data.directory / "other"))


def tiny_model(directory: Path) -> Path:
    make_tiny_model(directory / "model", TinyModelConfig(num_layers=1), seed=0)
    return directory / "model"


def test_data_that_is_no_file_is_refused_and_not_taken_for_absent(own_data: InitRequest, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "dir.parquet").mkdir()
    for name, kind in (("pipe.jsonl", "a named pipe"), ("dir.parquet", "a directory")):
        with pytest.raises(DataError, match=f"{name}: is {kind}, expected Parquet or JSON lines"):
            init_run(replace(own_data, train=[str(tmp_path / name)]))
    assert not (own_data.directory / "run.yaml").exists()


def test_refusals_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--gpus: 1 GPUs of 80 GiB are too few"):
        init_run(request(tmp_path, model="qwen3-32b", gpus=1))
    with pytest.raises(ConfigError, match=r"--algo: got 'grppo', expected one of .*grpo"):
        init_run(request(tmp_path, model="qwen3-8b", gpus=8, algo="grppo"))
    assert not list(tmp_path.glob("*.yaml"))
    (tmp_path / "run.yaml").touch()
    with pytest.raises(ConfigError, match=r"run\.yaml exists"):
        init_run(request(tmp_path, model="qwen3-8b", gpus=8))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def here(own_data: InitRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, data of columns that megarl does not know, and a reward function."""
    (tmp_path / "t.jsonl").write_text('{"question": "1+1=?", "answer": "2"}\n' * 16)
    (tmp_path / "mine.py").write_text(
        "def score(completions, answer, **columns):\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_options_do_not_say_is_asked_until_it_can_be_right(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megarl.plan.init.nvidia_devices", list)
    answers = "nowhere|model|-|t.txt|t.jsonl t.jsonl|-|grppo|||prompt|||your.py:f|mine.py:score|"
    monkeypatch.setattr("sys.stdin", Terminal(answers.replace("|", "\n")))
    asked = ask_missing(Path("first"), dict.fromkeys(("model", "train", "gpus")))
    assert (asked.model, asked.train, asked.val) == ("model", ["t.jsonl", "t.jsonl"], [])
    # Without a GPU on this machine, a run on CPU is suggested.
    assert (asked.algo, asked.gpus) == ("grpo", 0)
    assert (asked.prompt_key, asked.label_key, asked.reward) == ("question", "answer", "mine.py:score")
    told = re.findall(r": {3}(.+)", capsys.readouterr().out)
    expected = "nowhere/config.json", "name a file", "'.txt'", "'grppo'", "no column 'prompt'", "no file your.py"
    assert all(part in line for part, line in zip(expected, told, strict=True))
    config = load_config(init_run(asked))
    assert (config.data.prompt_key, config.data.label_key, config.data.default_source) == (
        "question",
        "answer",
        "first",
    )
    assert (config.rewards.custom.path, config.rewards.custom.name) == ("mine.py", "score")


def test_who_cannot_be_asked_is_told_the_options(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(ConfigError, match="--model, --train, --val, --algo: not given"):
        ask_missing(here, {"gpus": 16})
    with pytest.raises(ConfigError, match="--gpus: got 12, expected 0 to 8, or a multiple of 8"):
        ask_missing(here, {"model": "m", "train": ["t"], "val": [], "algo": "grpo", "gpus": 12})
    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(ConfigError, match="no answer to: model"):
        ask_missing(here, {"gpus": 16})
