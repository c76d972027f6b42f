"""Find out what a launch script starts, by running it in bash with a stub for each program that records its calls.

`recorder` runs it, in a sandbox that may execute bash and nothing else, for both outcomes of whatever the script does
not decide itself. An option that differs between runs is not known.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.programs import settings_of
from megarl.errors import ConfigError
from megarl_sandbox import Isolation, Limits, RunWithInput, Sandbox, SandboxOptions

SECONDS = 60
MAX_RUNS = 400
_MAX_FILE = 2**20
_ROUNDS = 12
_HERE = Path(__file__).parent
# Set for each job by what starts it, so unknown even where the script has a default.
_SCHEDULER = re.compile(r"(?:SLURM|PBS|LSB|OMPI|PMI)_\w+|PBS_NODEFILE|HOSTNAME|USER|LOGNAME")
_OWN = frozenset({"BASH_SOURCE", "PWD", "OLDPWD", "HOME", "PATH", "RANDOM", "SECONDS", "LINENO", "UID", "EUID", "IFS"})
_OWN |= {"OPTARG", "OPTIND", "BASH_REMATCH", "PIPESTATUS", "FUNCNAME", "REPLY", "PPID", "BASHPID", "BASH_VERSION"}
_USED = re.compile(r"\$(?:([A-Za-z_]\w*)|\{#?([A-Za-z_]\w*)(?!\w)(?!:?[-=+]))")
_SUM = re.compile(r"\(\(([^\n]*?)\)\)")
_DEFAULTED = re.compile(r"\$\{([A-Za-z_]\w*):?[-=+]")
_ASSIGNED = re.compile(
    r"(?<![\w$.-])([A-Za-z_]\w*)(?:\[[^]\n]*\])?\+?=(?![\"']?\$\{?\1\}?(?!\w))|\bfor\s+(\w+)\b|\b(?:read|mapfile|getopts|local|declare|readarray)\b([^\n;|<]*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCommand:
    """A command of a script: the file and line that have it, and its words."""

    file: str
    line: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One run of a script.

    is_first: with the first of two sets of numbers for what is not known. decisions: the places whose outcome was
    turned. ended: where the script itself ended, if it did.
    """

    is_first: bool
    decisions: tuple[str, ...]
    commands: tuple[StartedCommand, ...]
    status: int
    ended: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """All runs of a script. places: what a decision is about. unset: variables that nobody sets, used with or without a
    default. assumptions: what else the runs rest on.
    """

    executions: tuple[Execution, ...]
    places: Mapping[str, str]
    unknowns: Mapping[str, str]
    unset: tuple[str, ...]
    assumptions: tuple[str, ...]

    def show(self, text: str) -> str:
        """Return a text of a run with the first numbers, in which names stand for these."""
        return shown(text, self.unknowns)

    def unknown_in(self, text: str) -> list[str]:
        """Name what is not known in a text of a run with the first numbers."""
        return [self.unknowns[number] for number in re.findall(r"\d+", text) if number in self.unknowns]


def shown(text: str, unknowns: Mapping[str, str]) -> str:
    """Return a text in which names stand for numbers."""
    return re.sub(r"\d+", lambda match: unknowns.get(match[0], match[0]), text)


def follow(
    path: Path, *, variables: Mapping[str, str], arguments: Sequence[str] = (), run_anyway: bool = False
) -> Followed:
    """Run a script for all outcomes; raise ConfigError if it is not valid, or asks for more than the limits allow.

    variables, arguments: what the script is run with. run_anyway: also where there is no sandbox, and redirections of
    the script write files.
    """
    script = str(path.absolute())
    files = {script: _text(path)}
    bash = _bash()
    absent: list[str] = []
    used, unset = _variables(files.values(), variables)
    for _ in range(_ROUNDS):
        request = {
            "bash": bash,
            "stubs": (_HERE / "stubs.sh").read_text(encoding="utf-8"),
            "script": script,
            "files": files,
            "absent": absent,
            "given": [*arguments, *variables.values()],
            "arguments": list(arguments),
            "variables": {"HOME": str(Path.home()), **variables},
            "unset": unset,
            "directory": str(Path.cwd()),
            "seconds": SECONDS,
            "max_runs": MAX_RUNS,
        }
        answer = _record(request, path, run_anyway=run_anyway)
        if "error" in answer:
            raise ConfigError(
                f"{path}: {answer['error']}; convert a simpler script, or give its variables as NAME=VALUE"
            )
        if "wanted" not in answer:
            break
        for each in answer["wanted"]:
            if not each.startswith("/"):
                unset.append(each)
            # Those of /dev and /proc are this process's own.
            elif (
                not each.startswith(("/dev/", "/proc/"))
                and Path(each).is_file()
                and Path(each).stat().st_size <= _MAX_FILE
            ):
                files[each] = _text(Path(each))
                used, unset = _variables(files.values(), variables, unset)
            else:
                absent.append(each)
    else:
        raise ConfigError(f"{path}: it asks for ever more files and variables; convert a simpler script")
    return _followed(path, answer, used, unset, absent)


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; give a shell script") from None
    if "\r\n" in text:
        raise ConfigError(
            f"{path}: its lines end as on Windows, so that no backslash continues a line in bash; run "
            f"sed -i 's/\\r$//' {path}"
        )
    return text


def _bash() -> str:
    bash = shutil.which("bash")
    told = "(none)"
    if bash:
        command = [bash, "--norc", "-c", 'echo "${BASH_VERSINFO[0]}.${BASH_VERSINFO[1]}"']
        told = subprocess.run(command, env={}, capture_output=True, encoding="utf-8", check=False).stdout.strip()
        if [int(part) for part in told.split(".")] >= [4, 4]:
            return str(Path(bash).resolve())
    raise ConfigError(f"bash reads launch scripts, and got {told}, expected 4.4 or newer on PATH; install it")


def _variables(texts: Iterable[str], given: Mapping[str, str], more: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return the variables that these scripts use and do not set, and those of them to which numbers are given."""
    text = "\n".join(texts)
    assigned = {
        word
        for match in _ASSIGNED.finditer(text)
        for group in match.groups()
        for word in re.findall(r"\w+", group or "")
    }
    used = dict.fromkeys(name for match in _USED.finditer(text) for name in match.groups() if name)
    used |= dict.fromkeys(name for sum_ in _SUM.findall(text) for name in re.findall(r"(?<![\w$])[A-Za-z_]\w*", sum_))
    defaulted = dict.fromkeys(_DEFAULTED.findall(text))
    free = [name for name in {**used, **defaulted} if name not in assigned and name not in _OWN and name not in given]
    named = [name for name in free if name not in defaulted or _SCHEDULER.fullmatch(name)]
    return free, list(dict.fromkeys([*more, *named]))


def _record(request: Mapping[str, Any], path: Path, *, run_anyway: bool) -> dict[str, Any]:
    """Have `recorder` answer the request, in a sandbox if there is one."""
    source = (_HERE / "recorder.py").read_text(encoding="utf-8")
    limits = Limits(
        cpu_s=SECONDS, wall_s=2.0 * SECONDS, processes=256, files=4096, files_mib=64, output_mib=64, memory_mib=2048
    )
    options = SandboxOptions(isolation=Isolation.NAMESPACES, limits=limits, executables=(str(request["bash"]),))
    try:
        with settings_of("sandbox"), Sandbox(options) as sandbox, sandbox.program(source) as program:
            outcome = program.run(RunWithInput(text=json.dumps({**request, "may_write": True})))
    except ConfigError as error:
        if run_anyway:
            return _record_here(source, json.dumps({**request, "may_write": False}))
        reason = str(error).partition(": this machine isolates no programs: ")[2].partition("; or set ")[0]
        raise ConfigError(
            f"{path}: bash reads launch scripts in a sandbox, and this machine has none ({reason or error}); "
            "--run-script runs it without one, with stubs for the programs that it names: read the script first"
        ) from None
    if not outcome.succeeded:
        last = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(
            f"{path}: reading it in bash ended with {outcome.ending.value} {last!r}; convert a simpler script"
        )
    return json.loads(outcome.stdout)


def _record_here(source: str, request: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-c", source]
        done = subprocess.run(
            command, input=request, env={"TMPDIR": folder}, capture_output=True, encoding="utf-8", check=True
        )
    return json.loads(done.stdout)


def _followed(path: Path, answer: Mapping[str, Any], used: list[str], unset: list[str], absent: list[str]) -> Followed:
    executions = answer["executions"]
    first = executions[0]
    if found := re.search(r"line (\d+): (syntax error.*|unexpected EOF.*)", first["stderr"]):
        raise ConfigError(f"{path}: line {found[1]}: {found[2]}; bash -n {path} checks its syntax")
    unknowns = {str(41000 + number): f"${name}" for number, name in enumerate(unset)}
    for execution in executions:
        for kind, _, line, _, *words in execution["events"]:
            if kind == "run":
                unknowns.setdefault(str(70000 + int(line)), f"$({words[0]})")
    unknowns.setdefault("70000", "$(<file)")
    assumptions = [f"There is no {shown(each, unknowns)}, as on this machine." for each in absent]
    cases = [
        {(event[2], *event[4:]) for event in execution["events"] if event[0] == "case"} for execution in executions[:2]
    ]

    assumptions += [
        f"line {line}: case {shown(' '.join(words), unknowns)} takes the branch for any text."
        for line, *words in cases[0] - cases[1]
    ]
    return Followed(
        executions=tuple(
            Execution(
                is_first=execution["numbers"] == "first",
                decisions=tuple(execution["flips"]),
                commands=tuple(
                    StartedCommand(file=file, line=int(line), words=tuple(words))
                    for kind, file, line, _, *words in execution["events"]
                    if kind == "run"
                ),
                status=execution["status"],
                ended=_ended(execution),
            )
            for execution in executions
        ),
        places=answer["places"],
        unknowns=unknowns,
        unset=tuple(used),
        assumptions=tuple(assumptions),
    )


def _ended(execution: Mapping[str, Any]) -> str:
    """Say where the script ended itself, or else the last error of bash if it failed."""
    for event in execution["events"]:
        if event[0] == "exit":
            return f"line {event[2]}: exit {event[4]}"
    errors = re.findall(r"line \d+: [^\n]+", execution["stderr"])
    return errors[-1] if execution["status"] and errors else ""
