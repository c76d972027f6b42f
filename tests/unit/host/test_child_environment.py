"""Processes that run the code of others get what programs need, and the variables that are named."""

import os

import httpx
import pytest

from megarl.errors import ConfigError
from megarl.host import child_environment as module
from megarl.host.child_environment import (
    child_environment,
    client_environment,
    limit_environment,
    proxy_of,
    without_proxy_here,
)

USERS = {
    "HF_TOKEN": "a",
    "WANDB_API_KEY": "b",
    "AWS_ACCESS_KEY_ID": "c",
    "AWS_SECRET_ACCESS_KEY": "d",
    "RAY_AUTH_TOKEN": "e",
    "OPENAI_API_KEY": "f",
    "VLLM_API_KEY": "g",
    "SSH_AUTH_SOCK": "h",
    "MEGARL_RUN_SECRET": "i",
    "SOME_SETTING": "j",
}
NEEDED = {
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "https_proxy": "http://proxy:3128",
    "SSL_CERT_FILE": "/certificates.pem",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_HOME": "/models",
    "MEGARL_RUN_ID": "run",
    "PYTHONPATH": "/code",
}


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (USERS | NEEDED).items():
        monkeypatch.setenv(name, value)


def test_keys_stay_behind_unless_they_are_named() -> None:
    found = child_environment((), key="k")
    assert found.keys().isdisjoint(USERS)
    assert found.items() >= NEEDED.items()
    assert found["PATH"] == os.environ["PATH"]
    assert child_environment(["HF_TOKEN"], key="k") == {**found, "HF_TOKEN": "a"}


def test_a_variable_that_is_not_set_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"environment.pass_env: NOT_SET is not set; export it"):
        child_environment(["NOT_SET"], key="environment.pass_env")


def test_a_process_can_limit_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_of_clients", {})
    monkeypatch.setenv("DOCKER_HOST", "ssh://there")
    monkeypatch.setenv("APPTAINER_BINDPATH", "/data")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    limit_environment(["WANDB_API_KEY"], key="k")
    assert os.environ.keys() & USERS.keys() == {"WANDB_API_KEY"}
    assert os.environ.items() >= NEEDED.items()
    assert not {"DOCKER_HOST", "APPTAINER_BINDPATH"} & os.environ.keys()
    own = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    assert client_environment() == own
    assert client_environment("docker").items() >= {**own, "DOCKER_HOST": "ssh://there", "SSH_AUTH_SOCK": "h"}.items()
    for client in ("docker", "apptainer"):
        assert not {"HF_TOKEN", "WANDB_API_KEY", "APPTAINER_BINDPATH"} & client_environment(client).keys()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1/v1", "http://[::1]:1"])
@pytest.mark.parametrize("given", [None, "", "127.0.0.0/8", "10.0.0.1, .cluster", "localhost"])
def test_no_client_asks_a_proxy_for_this_host(given: str | None, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx, on which OpenAI's and MCP's clients build, reads no networks such as 127.0.0.0/8."""
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False) if given is None else monkeypatch.setenv(name, given)
    kept = [name.strip() for name in (given or "").split(",") if name.strip()]
    for name, value in without_proxy_here().items():
        assert value.split(",")[: len(kept)] == kept
        monkeypatch.setenv(name, value)
    client = httpx.Client(verify=False)
    assert client._transport_for_url(httpx.URL(url)) is client._transport
    assert client._transport_for_url(httpx.URL("http://elsewhere.example")) is not client._transport


@pytest.mark.parametrize(
    ("url", "given", "proxy"),
    [
        ("http://judge/v1", {}, ""),
        ("http://judge/v1", {"HTTP_PROXY": "http://proxy:1"}, "http://proxy:1"),
        ("http://judge/v1", {"HTTP_PROXY": "proxy:1"}, "http://proxy:1"),
        ("http://judge/v1", {"HTTPS_PROXY": "http://proxy:1"}, ""),
        ("https://judge/v1", {"HTTPS_PROXY": "http://secure:1", "ALL_PROXY": "http://proxy:1"}, "http://secure:1"),
        ("http://judge/v1", {"ALL_PROXY": "http://proxy:1", "NO_PROXY": "judge"}, ""),
        ("http://a.judge:8/v1", {"HTTP_PROXY": "http://proxy:1", "NO_PROXY": ".judge"}, ""),
        ("http://127.0.0.2:8/v1", {"HTTP_PROXY": "http://proxy:1"}, ""),
        ("http://localhost:8/v1", {"ALL_PROXY": "socks5://proxy:1"}, ""),
        ("http://judge/v1", {"ALL_PROXY": "socks5://proxy:1", "NO_PROXY": "judge"}, ""),
        ("http://judge/v1", {"ALL_PROXY": "socks5://proxy:1"}, None),
        # httpx opens all of them.
        ("http://judge/v1", {"HTTP_PROXY": "http://proxy:1", "HTTPS_PROXY": "socks5h://proxy:1"}, None),
    ],
)
def test_who_is_asked_through_a_proxy(
    url: str, given: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.upper().endswith("_PROXY")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("megarl.host.child_environment.find_spec", lambda _: None)
    if proxy is None:
        with pytest.raises(
            ConfigError, match=r"^k: http://judge/v1 is asked through .* SOCKS .*; run pip install socksio"
        ):
            proxy_of(url, "k")
    else:
        assert proxy_of(url, "k") == proxy


def test_what_keeps_megarls_processes_from_a_users_files_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert "PYTHONSAFEPATH" not in child_environment((), key="pass_env")
    assert child_environment(("PYTHONSAFEPATH",), key="pass_env")["PYTHONSAFEPATH"] == "1"
