"""Try users' code before a run starts, in a process of its own, so that its faults cost nothing.

A trial that has passed is noted in the user's cache directory with the SHA-256 of every file of the user that took
part, and is not repeated until one of them or a setting that it reads changes. `--dry-run` repeats all
but episodes every time.
"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING

from megarl import __version__
from megarl.config.rewards import CustomConfig
from megarl.config.schema import Config
from megarl.environments.base import is_rehearsed
from megarl.environments.rehearsal import Schemas
from megarl.errors import ConfigError
from megarl.host.child_environment import without_proxy_here
from megarl.host.clock import awake_s
from megarl.host.reading import read_object
from megarl.host.streams import print_lines
from megarl.host.user_code import place_in
from megarl.host.writing import dispensable, replacing
from megarl.types import Prompt

if TYPE_CHECKING:
    from megarl.data.images import DataImages

# Importing torch takes long on a busy machine, which is not the fault of the user's code.
START_S = 600.0
# How often to look at a trial, and how long one that is late may take to print where it is.
_LOOK_S, _FATAL_S = 0.1, 10.0
_MOST_PRINTED, _TAIL_BYTES = 1_000_000, 1 << 20
_ROOT = str(Path(__file__).parents[2])
_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from megarl.train.rehearsed import main; main()"
REMEDY = "raise run.rehearsal_s, or set it to null for no trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The code to try: the plugins and reward functions of a configuration, and an episode for each prompt.

    every: try all parts that plugins register, by their defaults, not only those that the configuration chooses. file:
    try the functions and classes of this file as well, or the one called `name`.
    """

    config: Config
    prompts: tuple[Prompt, ...] = ()
    every: bool = False
    file: str = ""
    name: str = ""

    @property
    def is_empty(self) -> bool:
        algo, rewards = self.config.algo, self.config.rewards
        return not (algo.plugins or rewards.custom.all_functions() or self.prompts or self.file)

    @property
    def key(self) -> str:
        """Return a hash of the settings that the tried code reads."""
        config, names = self.config, sorted(prompt.environment for prompt in self.prompts)
        read = [asdict(config.algo), asdict(config.rewards.custom), asdict(config.environment), names]
        sizes = [config.rollout.num_samples, asdict(config.train_preference), config.data.image_key]
        return sha256(repr((__version__, sys.executable, read, sizes)).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results of a trial: a line per part that was tried, mistakes, what may be one, hashes of the user's files,
    and the schemas of tools that each environment has shown.
    """

    tried: Sequence[str]
    mistakes: Sequence[str]
    warnings: Sequence[str]
    files: dict[str, str]
    tools: dict[str, Schemas]


def rehearse(config: Config, *, afresh: bool = False) -> Config:
    """Try the plugins of a run and load its reward functions; return the configuration. Raises ConfigError.

    afresh: also if the same files have passed before, but reward functions only if their files are here: a plan may be
    made on another machine.
    """
    custom = config.rewards.custom
    if afresh and not all(Path(each.path).is_file() for each in custom.all_functions().values()):
        custom = CustomConfig()
    _passed(Trial(config=replace(config, rewards=replace(config.rewards, custom=custom))), afresh=afresh)
    return config


def rehearse_episodes(
    config: Config, prompts: Iterable[Prompt], environments: Collection[str], images: "DataImages | None" = None
) -> dict[str, Schemas]:
    """Play an episode with each of the environments that these prompts use, but for those with `rehearse: false`.

    images: those of the prompts, which are kept. Returns the tools that each has shown. Raises ConfigError.
    """
    wanted, firsts = {name for name in environments if is_rehearsed(config.environment, name)}, dict[str, Prompt]()
    for prompt in prompts if wanted else ():
        if prompt.environment in wanted:
            if images is not None and prompt.environment not in firsts:
                from megarl.environments.images import ReplyImages

                sent = ReplyImages(images).sent
                prompt = replace(prompt, messages=tuple(map(sent, prompt.messages)), images=())
            firsts.setdefault(prompt.environment, prompt)
        if len(firsts) == len(wanted):
            break
    # Neither plugins nor rewards take part.
    algo, rewards = replace(config.algo, plugins=(), settings={}), replace(config.rewards, custom=CustomConfig())
    own = replace(config, algo=algo, rewards=rewards)
    return _passed(Trial(config=own, prompts=tuple(firsts.values())), afresh=False)


def _passed(trial: Trial, *, afresh: bool) -> dict[str, Schemas]:
    if trial.is_empty or trial.config.run.rehearsal_s is None:
        return {}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megarl/rehearsed" / trial.key
    if not afresh and cache.is_file():
        noted = read_object(cache)
        files = ((Path(file), known) for file, known in noted["files"].items())
        if all(file.is_file() and sha256(file.read_bytes()).hexdigest() == known for file, known in files):
            return dict(noted["tools"])
    found = try_out(trial)
    if found.mistakes:
        raise ConfigError(found.mistakes[0])
    with dispensable("the note of a trial"), replacing(cache) as file:
        file.write_text(json.dumps({"files": found.files, "tools": found.tools}), encoding="utf-8")
    return found.tools


def try_out(trial: Trial) -> Findings:
    """Try users' code in a new process, and end whatever that leaves behind."""
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, _ROOT, str(told.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[told.fileno()],
            start_new_session=True,
            # As in the processes of a run.
            env=os.environ | without_proxy_here(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        printed, began, is_late = _Printed(process.stdout), awake_s(), False
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as request:
                pickle.dump((sys.path, trial), request)
            limit_s, is_tried = START_S, False
            while process.poll() is None and not is_late:
                if not is_tried and os.fstat(told.fileno()).st_size:
                    is_tried, began, limit_s = True, awake_s(), trial.config.run.rehearsal_s or START_S
                if is_late := awake_s() - began > limit_s:
                    # Python then prints where it is, whatever holds it up.
                    process.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_FATAL_S if is_late else _LOOK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            printed.join(1.0)
        told.seek(0)
        lines = [json.loads(line) for line in told.read().splitlines()]
    kinds = ("about", "mistake", "warning")
    tried, mistakes, warnings = (list(dict.fromkeys(x[kind] for x in lines if kind in x)) for kind in kinds)
    files = {file: known for each in lines for file, known in each.get("files", {}).items()}
    tools = {name: schemas for each in lines for name, schemas in each.get("tools", {}).items()}
    if {"is_done": True} not in lines:
        about = tried[-1] if tried else "the trial of users' code"
        mistakes.append(_death(trial, about, None if is_late else process.returncode, printed))
    if printed.num_bytes > _MOST_PRINTED:
        size, last = f"{printed.num_bytes / 1e6:.1f} MB", printed.text.strip()[-80:]
        print_lines(
            f"warning: users' code printed {size} when it was tried, and would in every step; its last: {last!r}"
        )
    return Findings(tried=tried, mistakes=mistakes, warnings=warnings, files=files, tools=tools)


class _Printed(threading.Thread):
    """Reads what a process prints, however much it is, and keeps the end."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._stream, self._tail = stream, bytearray()
        self.num_bytes = 0
        self.start()

    def run(self) -> None:
        while chunk := os.read(self._stream.fileno(), 1 << 16):
            # By bytes, not by chunks: faulthandler writes a stack in hundreds of small pieces.
            self._tail += chunk
            del self._tail[:-_TAIL_BYTES]
            self.num_bytes += len(chunk)

    @property
    def text(self) -> str:
        return self._tail.decode(errors="replace")


def _death(trial: Trial, about: str, code: int | None, printed: _Printed) -> str:
    """Say how a trial's process ended that did not come to its end. code: None if it was late."""
    # The stack of a process that dies has the innermost frame first.
    place = place_in("\n".join(reversed(printed.text.splitlines())))
    at = f", at {place}" if place else ""
    if code is None:
        limit = f"{trial.config.run.rehearsal_s or START_S:g} s"
        return f"{about}: has not returned within run.rehearsal_s={limit}{at}; look into what it waits for, or {REMEDY}"
    if code < 0:
        return f"{about}: ended its process by {signal.Signals(-code).name}{at}; correct it"
    last = printed.text.strip().rpartition("\n")[2]
    return f"{about}: ended its process with exit code {code}{f' ({last:.200})' if last else ''}; let it return"
