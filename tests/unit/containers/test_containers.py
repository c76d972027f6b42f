"""The definitions of images: both make the same, of files that exist; and what containers/install.sh runs."""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONTAINERS = ROOT / "containers"
HOME = "/opt/megarl/src/"


def dockerfile() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments."""
    text = re.sub(r"^#.*\n", "", (CONTAINERS / "Dockerfile").read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", text)
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def definition() -> Mapping[str, list[str]]:
    """The lines of each section of the Apptainer definition, and its header under the empty name."""
    joined = re.sub(r"\\\n\s*", "", (CONTAINERS / "megarl.def").read_text())
    header, *sections = re.split(r"^%", joined, flags=re.MULTILINE)
    named = [("", header), *((name, body) for name, _, body in (section.partition("\n") for section in sections))]
    return {name: [line.strip() for line in body.splitlines() if line.strip()] for name, body in named}


def packages(commands: str) -> set[str]:
    found = re.search(r"apt-get install ([^&\n]*)", commands)
    assert found is not None
    return {word for word in found[1].split() if not word.startswith("--")}


def test_the_definition_has_the_sections_that_apptainer_knows() -> None:
    assert list(definition()) == ["", "help", "arguments", "files", "post", "environment"]
    assert definition()["post"][0] == "set -eu"


def test_both_start_from_the_same_public_image_and_install_the_same() -> None:
    steps, sections = dockerfile(), definition()
    images = [rest for name, rest in steps if name == "FROM"]
    assert sections[""] == ["Bootstrap: docker", f"From: {images[0]}"]
    assert re.fullmatch(r"nvidia/cuda:[\d.]+-devel-ubuntu24\.04", images[0])
    runs = [rest for name, rest in steps if name == "RUN"]
    post = "\n".join(sections["post"])
    assert packages(runs[0]) == packages(post)
    assert {"gcc", "g++", "python3.12", "python3.12-dev", "python3.12-venv"} <= packages(post)
    # What follows apt-get, but for the names of the environment's own Python and of the arguments.
    own = re.sub(r"\{\{ (\w+) \}\}", r"$\1", post).replace("/opt/megarl/venv/bin/python", "python").splitlines()
    assert own[-3:] == ["cd /opt/megarl/src", *runs[1:]]
    assert ("WORKDIR", "/opt/megarl/src") in steps
    assert [f"ENV {line.removeprefix('export ')}" for line in sections["environment"]] == [
        f"{name} {rest}" for name, rest in steps if name == "ENV"
    ]
    assert (
        sections["arguments"]
        == [rest for name, rest in steps if name == "ARG"]
        == [f"{name}=0" for name in ("APEX", "DEEPEP", "FLASH_ATTN_3")]
    )


def test_both_copy_the_same_files_which_exist() -> None:
    copied = []
    for name, rest in dockerfile():
        *sources, target = rest.split() if name == "COPY" else [""]
        copied += [(source, HOME + (source if target == "./" else target)) for source in sources]
    assert sorted(copied) == sorted(tuple(line.split()) for line in definition()["files"])
    assert all((ROOT / source).exists() for source, _ in copied)
    # What setup.py and the Makefile's test-gpu read.
    assert {"setup.py", "pyproject.toml", "configs", "megarl", "tests", "Makefile"} <= {source for source, _ in copied}


FAKE_PYTHON = """#!/bin/bash
if [[ "$1 $2" == "-m venv" ]]; then
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && exit
fi
if [[ "$1" == -c ]]; then
    echo "$PACKAGES" && exit
fi
printf '%q ' "CPATH=$CPATH" "FORCE=$NVTE_PYTORCH_FORCE_BUILD" "APEX=$APEX_CPP_EXT$APEX_CUDA_EXT" "$@" >>"$LOG"
echo >>"$LOG"
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a CUDA toolkit, and a Python whose pip only notes what it is asked for."""
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "cuda/bin/nvcc").touch()
    for program in ("python", "cuda/bin/nvcc"):
        (tmp_path / program).chmod(0o755)
    for library in ("cudnn", "nccl"):
        (tmp_path / "packages/nvidia" / library / "include").mkdir(parents=True)
    places = {"PYTHON": "python", "CUDA_HOME": "cuda", "PACKAGES": "packages", "LOG": "log"}
    kept = {name: value for name, value in os.environ.items() if name not in ("CPATH", "APEX")}
    return kept | {name: str(tmp_path / place) for name, place in places.items()}


def install(machine: Mapping[str, str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(CONTAINERS / "install.sh"), str(tmp_path / "venv")]
    return subprocess.run(command, env=machine, capture_output=True, text=True)


@pytest.mark.parametrize("with_apex", [False, True])
def test_what_is_installed_is_pinned_and_compiled_against_the_wheels(
    machine: dict[str, str], tmp_path: Path, with_apex: bool
) -> None:
    done = install(machine | ({"APEX": "1"} if with_apex else {}), tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [shlex.split(line) for line in (tmp_path / "log").read_text().splitlines()]
    headers = [f"{tmp_path}/packages/nvidia/{library}/include" for library in ("nccl", "cudnn")]
    wheels, *built, listed = steps
    # What dry runs read as cluster.target, once all is installed.
    assert listed[-3:] == ["list", "--format=freeze", "--disable-pip-version-check"]
    assert wheels[:3] == ["CPATH=", "FORCE=", "APEX="]
    assert wheels[-4:] == ["--only-binary", ":all:", "-r", "requirements/cuda.txt"]
    given = [(step[0], step[1], step[2], step[-1]) for step in built]
    on_path = f"CPATH={':'.join(headers)}"
    extension = (on_path, "FORCE=TRUE", "APEX=", "requirements/cuda-source.txt")
    apex = (on_path, "FORCE=", "APEX=11", "requirements/apex.txt")
    assert given == [extension, apex][: 1 + with_apex]
    assert all("--no-build-isolation" in step for step in built)
    assert all({"install", "--no-deps"} <= set(step) for step in (wheels, *built))


def test_a_missing_toolkit_and_wheels_without_headers_are_named(machine: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "packages/nvidia/nccl/include").rmdir()
    done = install(machine, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"install.sh: no {tmp_path}/packages/nvidia/nccl/include; its wheel")
    (tmp_path / "cuda/bin/nvcc").unlink()
    (tmp_path / "log").unlink()
    done = install(machine, tmp_path)
    assert (done.returncode, (tmp_path / "log").exists()) == (2, False)
    assert done.stderr.startswith(f"install.sh: no {tmp_path}/cuda/bin/nvcc; install the CUDA toolkit 13.0")
