"""A machine that checks settings for another one: what it knows of its packages, and that both say the same."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config import target
from megarl.config.models import transformer_engine_version
from megarl.config.target import Target, checked_for, has_package, named_target, package_version, read_packages
from megarl.errors import ConfigError
from megarl.host.device.platform import PLATFORMS, platform

ROOT = Path(__file__).parents[3]
ON_NODES = {"torch": "2.13.0", "megatron-core": "0.19.2", "transformer-engine": "2.20.2", "triton": "3.7.1"}
LISTING = "".join(f"{name}=={version}\n" for name, version in ON_NODES.items())


@pytest.fixture(autouse=True)
def _no_target_of_the_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MEGARL_TARGET", "MEGARL_VENV", "MEGARL_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_another_machine_is_known_by_its_packages_alone(tmp_path: Path) -> None:
    (tmp_path / "packages.txt").write_text(LISTING)
    found = named_target("packages.txt")
    assert found == Target(platform="cuda", packages=ON_NODES)
    before = platform().name
    with checked_for(found):
        assert (platform().name, transformer_engine_version()) == ("cuda", (2, 20))
        assert [has_package(name) for name in ("transformer_engine", "vllm")] == [True, False]
        assert (package_version("torch"), package_version("ray"), target.known_devices()) == ("2.13.0", None, [])
        with checked_for(Target(platform="cpu", packages={})):
            assert (platform().name, has_package("transformer_engine")) == ("cpu", False)
        assert has_package("transformer_engine")
    assert (platform().name, has_package("vllm"), has_package("transformer_engine")) == (before, True, False)


@pytest.mark.parametrize(
    ("torch", "gpus", "expected"),
    [("2.13.0", None, "cuda"), ("2.13.0+cpu", None, "cpu"), ("2.13.0", False, "cpu"), ("2.13.0+cpu", True, "cuda")],
)
def test_the_platform_is_that_of_torchs_build_unless_the_job_says(
    torch: str, gpus: bool | None, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "packages.txt").write_text(f"torch=={torch}\n")
    found = named_target("packages.txt", gpus=gpus)
    assert found is not None
    assert found.platform == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Flash_Attn.3==3.0", {"flash-attn-3": "3.0"}),
        ("# by pip\n\ntorch==2 \\\n    --hash=sha256:ab", {"torch": "2"}),
        ("a==1 ; python_version>'3'", {"a": "1"}),
        (
            "torch",
            r"^p.txt, line 1: got 'torch', expected a package and its version in each line, such as torch==2.13.0;",
        ),
        ("-e git+https://x", r"^p.txt, line 1: got '-e git.*write it with `pip list --format=freeze` where"),
    ],
)
def test_files_of_packages(line: str, expected: Mapping[str, str] | str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(line)
    if isinstance(expected, dict):
        assert read_packages(Path("p.txt")) == expected
        return
    with pytest.raises(ConfigError, match=str(expected)):
        read_packages(Path("p.txt"))


def test_files_that_are_named_must_be_there_and_have_torch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^none.txt: no such file in .*; write it with `pip list"):
        named_target("none.txt")
    (tmp_path / "p.txt").write_text("ray==2\n")
    with pytest.raises(ConfigError, match=r"^p.txt: names no torch, with which a run computes; write it with"):
        named_target("p.txt")


def test_who_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting, then the environment, then slurm/env.sh, of which nothing else is run."""
    assert (named_target(None), named_target(None, gpus=False)) == (None, Target(platform="cpu"))
    # Here are no GPUs, so that others are taken to have what containers/install.sh installs.
    elsewhere = named_target(None, gpus=True)
    assert elsewhere is not None
    assert {"torch", "transformer-engine", "transformer-engine-torch"} <= set(elsewhere.packages or ())
    with monkeypatch.context() as patch:
        patch.setattr(target, "platform", PLATFORMS["cuda"])
        assert named_target(None, gpus=True) == Target(platform="cuda")
    (tmp_path / "slurm").mkdir()
    text = (ROOT / "slurm/env.sh").read_text(encoding="utf-8")
    (tmp_path / "slurm/env.sh").write_text(f"touch mark; exit 1\n{text}")
    assert named_target(None) is None
    for name, torch in ((".venv", "1"), ("own", "2"), ("exported", "3"), ("set", "4")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "packages.txt").write_text(f"torch=={torch}\n")
    seen = []

    def torch_of(setting: str | None) -> str:
        found = named_target(setting)
        assert found is not None
        assert found.packages is not None
        return found.packages["torch"]

    seen.append(torch_of(None))
    monkeypatch.setenv("MEGARL_VENV", str(tmp_path / "own"))
    seen.append(torch_of(None))
    monkeypatch.setenv("MEGARL_TARGET", str(tmp_path / "exported/packages.txt"))
    seen.append(torch_of(None))
    seen.append(torch_of("set/packages.txt"))
    assert seen == ["1", "2", "3", "4"]
    assert not (tmp_path / "mark").exists()


def answers(**variables: str) -> dict[str, str]:
    """What a process with these variables says of run files, families and features."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEGARL_")}
    command = [sys.executable, "-m", "tests.helpers.target_answers"]
    done = subprocess.run(command, cwd=ROOT, env=kept | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("without", [(), ("transformer-engine",)], ids=["with Transformer Engine", "without"])
def test_a_login_node_answers_as_the_nodes_would(without: tuple[str, ...], tmp_path: Path) -> None:
    """The login node has CPU packages and a file; the node, on a CUDA platform, has the packages themselves."""
    packages = {name: version for name, version in ON_NODES.items() if name not in without}
    (tmp_path / "packages.txt").write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
    site = tmp_path / "site"
    for name, version in packages.items():
        about = site / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (site / name.replace("-", "_")).mkdir()
        (site / name.replace("-", "_") / "__init__.py").touch()
    login = answers(MEGARL_TARGET=str(tmp_path / "packages.txt"))
    node = answers(MEGARL_DEVICE="cuda", PYTHONPATH=str(site))
    assert login == node
    assert len(login) > 90
    here = answers(MEGARL_DEVICE="cpu")
    # It would have said otherwise of itself.
    assert len([name for name, said in here.items() if login[name] != said]) > 20
    refused = [name for name, said in login.items() if re.match("actor.(fp8|moe.grouped_gemm):", said)]
    assert bool(refused) is bool(without)


def test_the_devices_of_the_nodes_are_known_where_the_file_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A login node refuses float8 for an A100, which lacks it, and plans by the memory that is there."""
    file, run = tmp_path / "packages.txt", str(ROOT / "configs/run/gsm8k-qwen3-8b.yaml")
    asked = ["train", run, "--dry-run", f"cluster.target={file}", f"model.config_path={ROOT}/configs/model/hf/qwen3-8b"]
    file.write_text(f"{LISTING}# device: NVIDIA A100-SXM4-40GB, 40960, 580.65.06, 8.0\n")
    with pytest.raises(SystemExit):
        main([*asked, "actor.fp8=blockwise"])
    error = capsys.readouterr().err
    assert "actor.fp8: got blockwise, which needs compute capability >= 9.0, but NVIDIA A100-SXM4-40GB has 8.0" in error
    main(asked)
    printed = capsys.readouterr().out
    assert f"target     cuda, packages of {file}, NVIDIA A100-SXM4-40GB (40 GiB)\n" in printed
    # An update without any recompute takes 42.0 GiB.
    assert re.search(
        r"derived    actor.recompute=full: the least that fits: 3\d.\d of 40 GiB \(update actor\)", printed
    )
    file.write_text(LISTING)
    main([*asked, "actor.fp8=blockwise"])
    assert f"target     cuda, packages of {file}, devices unknown\n" in capsys.readouterr().out


def test_a_device_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "packages.txt").write_text(f"{LISTING}# device: NVIDIA H100, much\n")
    with pytest.raises(ConfigError, match=r"^packages\.txt: got the device 'NVIDIA H100, much', expected"):
        named_target("packages.txt")
