"""Secrets show in names and in texts, and what is written or said has a mask in their place."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, dump
from megarl.config.check import check_train
from megarl.config.document import entries
from megarl.config.explain import explain
from megarl.config.load import from_dict, load_config, masked_config, saved_config
from megarl.errors import ConfigError
from megarl.host.masking import MASK, is_secret_name, masked, masked_text, require_no_secrets
from megarl.record.checkpoints import RunState
from megarl.record.metrics import JsonlSink, MetricsLogger
from megarl.record.recorder import RunRecorder
from megarl.report import write_report
from megarl.run.resume import changed_settings
from megarl.types import AlgoState

# A secret of each sort; none may be in anything that is written.
SECRETS = [f"S3CRET{i}" for i in range(12)]
ENTRY = {
    "type": "mcp",
    "arguments": {
        "server": f"https://user:{SECRETS[0]}@host/mcp?api_key={SECRETS[1]}",
        "env": {"ANY_NAME": SECRETS[2]},
        "headers": {"Authorization": f"Bearer {SECRETS[3]}"},
        "nested": [{"db_password": SECRETS[4]}],
        "words": ["--token", SECRETS[5], f"--api-key={SECRETS[6]}", f"PASSWORD={SECRETS[7]}"],
    },
}
REWARDS = {
    "manager": "remote",
    "remote": {"urls": [f"https://{SECRETS[8]}@host/score", f"http://host/score?n=1&token={SECRETS[9]}"]},
    "custom": {"arguments": {"apiKey": SECRETS[10]}},
    "judges": {"j": {"sampling": {"extra_body": {"client_secret": SECRETS[11]}}}},
}


def config_with_secrets(tmp_path: Path) -> Config:
    environment = {"entries": {"e": ENTRY}}
    run = {"name": "r", "dir": str(tmp_path)}
    return from_dict(Config, {"run": run, "environment": environment, "rewards": REWARDS})


@pytest.mark.parametrize(
    "name",
    [
        *("password", "DB_PASSWORD", "apiKey", "api-key", "X-Api-Key", "Authorization", "access_token", "token", "pwd"),
        *("AWS_SECRET_ACCESS_KEY", "client_secret", "Cookie", "private_key", "passphrase", "github_token", "HF_TOKEN"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("api_key_env", "headers_env", "prompt_key", "key", "max_tokens", "num_tokens", "eos_token", "stop_token"),
        *("passes", "private_key_path", "monkey", "author", "token_level", "secret_name", "tokenizer"),
    ],
)
def test_names_that_are_none(name: str) -> None:
    assert not is_secret_name(name)


def test_no_setting_of_megarl_has_the_name_of_a_secret() -> None:
    assert [entry.key for entry in entries() if is_secret_name(entry.key.rpartition(".")[2])] == []
    assert masked(asdict(Config())) == asdict(Config())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:pw@host:8000/v1", f"https://{MASK}@host:8000/v1"),
        ("https://token@host", f"https://{MASK}@host"),
        ("http://user:p/a@s?s@host/x", f"http://{MASK}@host/x"),
        ("GET https://h/x?a=1&API%5FKEY=k failed", f"GET https://h/x?a=1&API%5FKEY={MASK} failed"),
        ("https://h/x?X-Amz-Signature=k#access_token=k", f"https://h/x?X-Amz-Signature={MASK}#access_token={MASK}"),
        ("run --api-key k --port 3", f"run --api-key {MASK} --port 3"),
        ("env GITHUB_TOKEN=k program", f"env GITHUB_TOKEN={MASK} program"),
        ("host=h;password=k;n=1", f"host=h;password={MASK};n=1"),
        ("hf_token=k: not known", f"hf_token={MASK} not known"),
        ("X-Api-Key: k", f"X-Api-Key: {MASK}"),
        ('{"apiKey": "k", "n": 1}', f'{{"apiKey": "{MASK}", "n": 1}}'),
        ("the key sk-proj-0123456789abcdef", f"the key {MASK}"),
    ],
)
def test_texts_lose_their_secrets(text: str, expected: str) -> None:
    assert masked_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("http://host:8000/@scope/name?page=2", "s3://bucket/key", "Basic arithmetic problems", "Score: 3"),
        *("token = tokenizer.encode(text)", "ssh git at host", "Say: the secret is out.", "{{ question }}: {{ key }}"),
    ],
)
def test_texts_without_secrets_stay(text: str) -> None:
    assert masked_text(text) == text


def test_no_file_of_a_run_has_a_secret(tmp_path: Path) -> None:
    config = config_with_secrets(tmp_path)
    recorder = RunRecorder(config)
    with MetricsLogger([JsonlSink(recorder.paths.metrics)]) as log:
        log.log(1, {"critic/score/mean": 0.5})
    state = RunState(
        command="train",
        step=1,
        num_optimizer_steps=1,
        sampler={},
        algo=AlgoState(),
        source={},
        score=None,
        config=config,
    )
    (recorder.paths.root / "state.json").write_text(state.to_json())
    write_report(recorder.paths.root)
    files = [path for path in recorder.paths.root.rglob("*") if path.is_file()]
    assert {"config.yaml", "report.html", "state.json"} <= {path.name for path in files}
    found = [(path.name, secret) for path in files for secret in SECRETS if secret.encode() in path.read_bytes()]
    assert found == []
    assert MASK in recorder.paths.config.read_text()


def test_explanations_and_messages_have_no_secrets(tmp_path: Path) -> None:
    config = config_with_secrets(tmp_path)
    said = [explain("environment.entries.e.arguments", config), explain("rewards.remote.urls", config)]
    for wrong in (
        {"environment": {"entries": {"e": {"type": 3, "arguments": ENTRY["arguments"]}}}},
        {"environment": {"entries": {"e": {"type": "mcp", "arguments": [ENTRY["arguments"]]}}}},
        {"rewards": {"remote": {"urls": REWARDS["remote"]["urls"][0]}}},  # type: ignore[index]
    ):
        with pytest.raises(ConfigError) as failure:
            from_dict(Config, wrong)
        said.append(str(failure.value))
    assert [secret for secret in SECRETS for text in said if secret in text] == []


def test_a_saved_configuration_continues_with_the_users_secrets(tmp_path: Path) -> None:
    """Only the user's run file has them; what a checkpoint saved is compared with it, and trains nothing."""
    config = config_with_secrets(tmp_path)
    saved = saved_config(json.loads(json.dumps(asdict(masked_config(config)))))
    assert changed_settings(saved, config) == []
    # Checkpoints of earlier versions have secrets, which are not shown either.
    moved = replace(config, environment=replace(config.environment, entries={}))
    (change,) = changed_settings(config, moved)
    assert change.startswith("environment.entries: ")
    assert not any(secret in change for secret in SECRETS)
    with pytest.raises(ConfigError, match=r"environment.entries.e.arguments.server: got .*, the mask of a secret"):
        check_train(saved)


@pytest.mark.parametrize(
    "override",
    [
        *("environment.entries.e.arguments.env.NAME=k", "rewards.remote.urls=[http://user:pw@host/score]"),
        *("rewards.custom.arguments.password=k", "rollout.engine.vllm.hf_token=k"),
    ],
)
def test_a_secret_on_the_command_line_is_refused(override: str, tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text("{}")
    with pytest.raises(
        ConfigError, match="has a secret, and every user of this host can read command lines"
    ) as failure:
        load_config(file, [override])
    assert "pw" not in str(failure.value)
    load_config(file, ["rewards.judges.j.endpoint.api_key_env=KEY", "environment.pass_env=[HF_TOKEN]"])


@pytest.mark.parametrize(
    "words", [["p", "--token", "k"], ["p", "--api-key=k"], ["sh", "-c", "API_KEY=k p"], {"api-key": "k"}]
)
def test_commands_of_a_run_have_no_secrets(words: Any) -> None:
    with pytest.raises(ConfigError, match="every user of a host can read the command lines"):
        require_no_secrets(words, "command")
    require_no_secrets(["python", "-m", "server", "--port=3", "--max-tokens", "4"], "command")


def test_dumps_load_back(tmp_path: Path) -> None:
    """Without secrets a dump loads back to the same configuration; the page of settings promises it."""
    (file := tmp_path / "run.yaml").write_text(dump(Config()))
    assert load_config(file) == Config()
