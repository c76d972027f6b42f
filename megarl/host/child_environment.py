"""Choose the environment of processes that run the code of others: agents, tool servers, reward functions, judges.

They get what a program needs to run on this host, by a list of names. The keys and tokens with which a user works (for
hubs, trackers, clouds, and those of Ray and of the run itself) are not on it: a setting `pass_env` names what a process
needs besides.
"""

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Collection
from fnmatch import fnmatchcase
from importlib.util import find_spec
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from megarl.errors import ConfigError
from megarl.host.masking import masked

ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ"),
    *("TMPDIR", "TMP", "TEMP", "XDG_*_HOME", "XDG_RUNTIME_DIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "RES_OPTIONS"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX", "MALLOC_*", "GLIBC_TUNABLES"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "JAVA_HOME", "NODE_PATH", "GOPATH", "COVERAGE_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "UCX_*", "TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*", "TRITON_*"),
    "VLLM_*",
    *("OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*", "NUMEXPR_*", "TOKENIZERS_PARALLELISM"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT"),
    *("TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "MEGARL_RUN_ID", "MEGARL_DEVICE", "MEGARL_UMASK"),
)
_HERE = ("localhost", "127.0.0.1", "::1")
# By these, clients of containers find their daemon, its keys and their files. They are few by name for Apptainer, where
# others bind directories of the host or lift limits.
CLIENTS = {
    "docker": ("DOCKER_*", "CONTAINER_HOST", "CONTAINER_SSHKEY", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "XDG_*_HOME"),
    "apptainer": (
        *("APPTAINER_CACHEDIR", "APPTAINER_TMPDIR", "APPTAINER_CONFIGDIR", "XDG_RUNTIME_DIR"),
        *("APPTAINER_DOCKER_USERNAME", "APPTAINER_DOCKER_PASSWORD"),
    ),
}
# `limit_environment` keeps here what it removes of theirs.
_of_clients: dict[str, dict[str, str]] = {}
# Python then looks for modules neither in the current directory nor in that of its script.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
# A pattern must not let these through, as in VLLM_API_KEY.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH")


def python_module(name: str) -> list[str]:
    """Return the command that runs a module with this Python, whatever files lie in the current directory."""
    return [sys.executable, "-P", "-m", name]


def require_assertions() -> None:
    """Raise ConfigError where Python leaves assertions out."""
    if sys.flags.optimize:
        raise ConfigError(
            f"PYTHONOPTIMIZE: got {sys.flags.optimize} (or python -O), which takes assertions and docstrings from "
            "Ray, vLLM and Megatron, and these fail without; unset PYTHONOPTIMIZE"
        )


def proxy_of(url: str, key: str) -> str:
    """Return the proxy that a client asks for a URL, of the setting `key`; "" if it asks none, as for this host.

    Raises ConfigError if httpx lacks a package for one of the proxies: it opens all of them.
    """
    place, proxies = urlsplit(url), getproxies_environment()
    host = place.hostname or ""
    with contextlib.suppress(ValueError):
        host = "localhost" if ipaddress.ip_address(host).is_loopback else host
    if host == "localhost" or proxy_bypass(place.netloc.rpartition("@")[2]):
        return ""
    socks = [name for name in ("http", "https", "all") if proxies.get(name, "").startswith("socks")]
    if socks and find_spec("socksio") is None:
        raise ConfigError(
            f"{key}: {masked(url)} is asked through {socks[0].upper()}_PROXY, a SOCKS proxy, for which the package "
            "socksio is missing; run pip install socksio, or name the host in NO_PROXY"
        )
    proxy = proxies.get(place.scheme) or proxies.get("all", "")
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def without_proxy_here() -> dict[str, str]:
    """Return variables by which no client asks a proxy for this host.

    The names are those that every client reads: `127.0.0.0/8`, for example, only some do.
    """
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name for name in (*given.split(","), *_HERE) if name.strip()]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(dict.fromkeys(name.strip() for name in names)))


def child_environment(pass_env: Collection[str], *, key: str) -> dict[str, str]:
    """Return the allowed variables of this process, and those that `pass_env` names.

    Raises ConfigError if one of the latter is not set; `key` is the setting that names them.
    """
    if missing := [name for name in pass_env if name not in os.environ]:
        raise ConfigError(f"{key}: {missing[0]} is not set; export it, or remove it there")
    patterns = [allowed for allowed in ALLOWED if "*" in allowed]
    return {
        name: value
        for name, value in os.environ.items()
        if name in (*pass_env, *ALLOWED)
        or (
            name not in SAFE_PATH
            and not _SECRET.search(name)
            and any(fnmatchcase(name, pattern) for pattern in patterns)
        )
    }


def limit_environment(pass_env: Collection[str], *, key: str) -> None:
    """Remove from this process's environment what `child_environment` leaves out, but for `client_environment`."""
    kept = child_environment(pass_env, key=key)
    _of_clients.update({client: client_environment(client) for client in CLIENTS})
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]


def client_environment(client: str | None = None) -> dict[str, str]:
    """Return the environment of a program of ours that runs no code of others: a client of containers, by its name."""
    patterns = ("PATH", "HOME", "LANG", *CLIENTS.get(client or "", ()))
    found = {name: value for name, value in os.environ.items() if any(fnmatchcase(name, each) for each in patterns)}
    return _of_clients.get(client or "", {}) | found
