"""Models by their hub ids, downloaded from a hub that this process serves, with the hub's own client."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub.constants
import pytest

from megarl.config.judges import JudgeServerConfig
from megarl.config.model_names import models_of, with_models
from megarl.config.rewards import RewardsConfig
from megarl.config.schema import Config, CriticConfig, ModelConfig, ReferenceConfig, RewardModelConfig
from megarl.errors import ConfigError
from megarl.record.metrics import RunPaths
from megarl.run.resume import with_models_of_run
from megarl.weights.hub import commits_of, local_model

COMMIT, OLDER = "c0ffee" * 6 + "c0de", "0ff1ce" * 6 + "c0de"
FILES = {
    "config.json": b'{"architectures": ["Qwen3ForCausalLM"]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "README.md": b"read me",
    "pytorch_model.bin": b"the same weights",
    "original/model.safetensors": b"and again",
    "original/params.json": b"{}",
    # Without these, tools would be written by another template, and exports would lack their licence.
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "qwen.tiktoken": b"ranks",
    "LICENSE": b"free",
}
SMALL = {
    *("config.json", "tokenizer.json", "chat_template.jinja", "qwen.tiktoken", "LICENSE"),
    "additional_chat_templates/tool_use.jinja",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A hub with one model, org/tiny. asked: the files of which the content was sent. revisions: its branches and tags,
    and the commits that they stand for.
    """

    url: str
    server: ThreadingHTTPServer
    asked: set[str] = field(default_factory=set)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, an empty cache, and a working directory without models."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(start := "/api/models/org/tiny/revision/"):
                name = path.removeprefix(start)
                commit = found.revisions.get(name, name if name in (COMMIT, OLDER) else None)
                if commit is None:
                    self.answer(404, X_Error_Code="RevisionNotFound")
                else:
                    self.answer(200, json.dumps({"id": "org/tiny", "sha": commit, "siblings": []}).encode())
            elif path.startswith("/api/models/org/tiny/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in FILES.items()
                ]
                self.answer(200, json.dumps(tree).encode())
            elif path.startswith(start := "/org/tiny/resolve/"):
                commit, _, name = path.removeprefix(start).partition("/")
                if self.command != "HEAD":
                    found.asked.add(name)
                etag = hashlib.sha1(FILES[name]).hexdigest()
                self.answer(200, FILES[name], ETag=f'"{etag}"', X_Repo_Commit=commit)
            else:
                self.answer(404, X_Error_Code="RepoNotFound")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Hub(url=f"http://127.0.0.1:{server.server_port}", server=server)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for name, value in {
        "ENDPOINT": found.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": found.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.chdir(tmp_path)
    yield found
    server.shutdown()
    server.server_close()


def files_in(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_a_hub_id_becomes_a_directory_with_what_a_run_reads(hub: Hub) -> None:
    path = Path(local_model("org/tiny", "model.path"))
    assert path.name == COMMIT
    assert files_in(path) == SMALL | {"model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert hub.asked == SMALL | {"model.safetensors"}
    assert local_model(str(path), "model.path") == str(path)


def test_without_weights_none_are_downloaded(hub: Hub) -> None:
    path = Path(local_model("org/tiny", "model.path", weights=False))
    assert files_in(path) == hub.asked == SMALL
    # A run that follows completes the same directory.
    assert local_model("org/tiny", "model.path") == str(path)
    assert (path / "model.safetensors").is_file()


def test_a_path_that_exists_wins(hub: Hub) -> None:
    Path("org/tiny").mkdir(parents=True)
    for path in ("org/tiny", "no-such-directory", "/no/such/directory", "./no/such", "a/b/c", "org/../tiny", ""):
        assert local_model(path, "model.path") == path
    assert hub.asked == set()


def test_what_was_downloaded_needs_no_connection_later(hub: Hub) -> None:
    path = local_model("org/tiny", "model.path")
    hub.server.shutdown()
    hub.server.server_close()
    assert local_model("org/tiny", "model.path") == path


def test_an_unknown_id_says_where_it_was_sought_and_what_to_do(hub: Hub) -> None:
    with pytest.raises(ConfigError) as error:
        local_model("org/other", "critic.model_path")
    text = str(error.value)
    assert text.startswith(
        "critic.model_path: got 'org/other', which is not a directory here, and as the id of a model: "
    )
    assert f"{hub.url} has no model of this id" in text
    assert "HF_TOKEN" in text
    assert "huggingface-cli download org/other --local-dir DIR" in text
    assert "set critic.model_path=DIR" in text


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_out_of_reach_is_named_with_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ConfigError) as error:
        local_model("org/tiny", "model.path")
    text = str(error.value)
    assert f"downloading it from {hub.url} (HF_ENDPOINT) to {huggingface_hub.constants.HF_HUB_CACHE} (HF_HOME)" in text
    assert "huggingface-cli download org/tiny --local-dir DIR" in text
    assert "set model.path=DIR" in text


def test_every_model_of_a_configuration(hub: Hub) -> None:
    config = Config(
        model=ModelConfig(path="org/tiny"),
        reference=ReferenceConfig(model_path="org/tiny"),
        critic=CriticConfig(model_path="runs/critic/export"),
        reward_model=RewardModelConfig(model_path="org/tiny"),
    )
    local = with_models(config, local_model)
    path = local_model("org/tiny", "model.path")
    assert (local.model.path, local.reference.model_path, local.reward_model.model_path) == (path, path, path)
    assert local.critic == config.critic
    assert with_models(Config(), local_model) == Config()


def test_an_id_may_name_a_branch_a_tag_or_a_commit(hub: Hub) -> None:
    newest, older = local_model("org/tiny", "model.path"), local_model("org/tiny@v1", "model.path")
    assert (Path(newest).name, Path(older).name) == (COMMIT, OLDER)
    assert local_model("org/tiny@main", "model.path") == newest
    assert local_model(f"org/tiny@{OLDER}", "model.path") == older
    with pytest.raises(ConfigError) as error:
        local_model("org/tiny@v2", "model.path")
    assert f"{hub.url} has no branch, tag or commit v2 of it" in str(error.value)
    assert "huggingface-cli download org/tiny --local-dir DIR" in str(error.value)


def test_a_run_goes_on_with_the_commits_that_it_began_with(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """What the hub's main is meanwhile does not matter, and another revision that the user names does."""
    server = JudgeServerConfig(model="org/tiny")
    config = Config(
        model=ModelConfig(path="org/tiny"),
        critic=CriticConfig(model_path="org/tiny@v1"),
        rewards=RewardsConfig(judge_servers={"mine": server}),
    )
    begun = with_models(config, local_model, judges=True)
    recorded = commits_of(models_of(begun, judges=True))
    assert recorded == {
        "model.path: org/tiny": COMMIT,
        "critic.model_path: org/tiny": OLDER,
        "rewards.judge_servers.mine.model: org/tiny": COMMIT,
    }
    hub.revisions["main"] = OLDER
    assert with_models(config, local_model, judges=True) != begun
    versions = RunPaths.of(config.run).versions
    versions.parent.mkdir(parents=True)
    versions.write_text(json.dumps({"python": "3.12.1", **recorded}))
    assert with_models(with_models_of_run(config), local_model, judges=True) == begun
    other = with_models_of_run(Config(model=ModelConfig(path="org/tiny@main")))
    assert Path(with_models(other, local_model).model.path).name == OLDER
    # Elsewhere there is nothing to record, and nothing is said.
    assert commits_of({"model.path": "/models/tiny"}) == {}
    assert "warn" not in "".join(capsys.readouterr())


def test_judges_wait_where_none_are_asked(hub: Hub) -> None:
    config = Config(rewards=RewardsConfig(judge_servers={"mine": JudgeServerConfig(model="org/tiny")}))
    assert with_models(config, local_model) == config
    assert hub.asked == set()
