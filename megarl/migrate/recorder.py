"""Run a launch script in bash repeatedly, with a stub for every program, and say how the stubs were called.

This file is a program of its own, which imports nothing of this package: the sandbox runs it. It reads a request as
JSON and prints an answer (`answer`). Between two runs, one thing differs: the outcome of a stub or of a condition on
something outside the script (`flips`), or the numbers that stand for what is not known.
"""

import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

# In each run, the first numbers for unset variables and for outputs; options that depend on them differ between runs.
_NUMBERS = {"first": (41000, 70000), "second": (3, 5)}
# How long background processes may go on after the script.
_BACKGROUND_S = 1.0
_ERROR = re.compile(
    r"(?:line \d+|bash): (?P<what>.+): (?P<why>No such file or directory|unbound variable)$", re.MULTILINE
)
# Conditions come with the values that they look at; for `case` only the place is noted.
_BRACKETS = re.compile(
    r"(?P<before>(?:^|[;&|!{]|(?<![$(])\((?=[ \t])|\b(?:if|while|until|elif|then|do|else))[ \t]*)"
    r"(?P<all>\[\[(?=\s)(?P<text>(?:(?!\[\[|\]\]).){1,600}?)(?<=\s)\]\]|\(\((?P<sum>(?:(?!\(\(|\)\)).){1,300}?)\)\))"
    r"(?=[\s;&|)])",
    re.MULTILINE | re.DOTALL,
)
_CASE = re.compile(
    r"(?P<before>(?:^|;|\b(?:then|do|else))[ \t]*)(?P<all>case\s+(?P<word>\S+|\"[^\"\n]*\")\s+in\b)", re.M
)
_VALUE = re.compile(r"\$\{[^{}\n]*\}|\$[A-Za-z_0-9#@*?]\w*")
_OUTPUT = re.compile(r"\$\((?!\()|`")
_PATH = re.compile(r"(?<![\w$}./-])\.{0,2}/?[A-Za-z][\w.-]*(?:/[\w.-]+)+")
_OF_FILES = re.compile(r"(?<!\S)-(?:[abcdefghkprstuwxGLNOS]|nt|ot|ef)(?!\S)")


def watched(text: str) -> str:
    """Return a script's text in which conditions also report what they look at."""

    def condition(match: re.Match[str]) -> str:
        text = match["text"] or match["sum"]
        names = re.findall(r"(?<![\w$])[A-Za-z_]\w*", match["sum"] or "")
        values = [*(f'"{each}"' for each in _VALUE.findall(text)), *(f'"${{{each}-}}"' for each in names)]
        values += ['"$RANDOM"'] * bool(_OUTPUT.search(text))
        shown = re.sub(r"\s+", " ", match["all"]).replace("'", "'\\''")
        return f"{match['before']}{{ {match['all']}; _m_if '{shown}' {' '.join(values)}; }}"

    text = _BRACKETS.sub(condition, text)
    return _CASE.sub(lambda match: f"{match['before']}_m_case {match['word']}; {match['all']}", text)


class Recorder:
    """A recorder of the runs of one script, of which the `request` is that of `answer`."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.deadline = time.monotonic() + request["seconds"]
        self.runs = 0
        self.folder = tempfile.mkdtemp()
        texts = [*request["files"].values(), *request["given"]]
        paths = {path for text in texts for path in _PATH.findall(text)} | set(request["absent"])
        stubs = [f'function {path} {{ _m_path {path} "$@"; }}\n' for path in sorted(paths) if re.fullmatch(_PATH, path)]
        self.stubs = self._write("stubs.sh", request["stubs"] + "".join(stubs))
        self.script = request["script"]
        for path, text in request["files"].items():
            if request["may_write"]:
                self._place(path, watched(text))
            elif path == self.script:
                here = re.sub(r"\$(\{BASH_SOURCE(\[0\])?\}|\{0\}|BASH_SOURCE\b|0\b)", lambda _: self.script, text)
                self.script = self._write("script.sh", watched(here))

    def _write(self, name: str, text: str) -> str:
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def _place(self, path: str, text: str) -> None:
        """Make a file in the sandbox's own file system, with the directories that lead to it."""
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if not os.path.isdir(path):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
        except OSError:
            return  # in a read-only directory: the script's own error says so

    def run(self, numbers: str, flips: tuple[str, ...]) -> dict[str, Any]:
        """Run the script once, with `_NUMBERS` of that name and the outcomes of the places in `flips` reversed."""
        self.runs += 1
        if self.runs > self.request["max_runs"]:
            raise TimeoutError(f"it can go more than {self.request['max_runs'] // 2} ways")
        unset, outputs = _NUMBERS[numbers]
        events = tempfile.mkdtemp(dir=self.folder)
        for path in self.request["absent"] if self.request["may_write"] else ():
            self._place(path, f"{outputs}\n")
        environment = {
            **{name: str(unset + number) for number, name in enumerate(self.request["unset"])},
            **self.request["variables"],
            "PATH": "/nonexistent",
            "LC_CTYPE": "C.UTF-8",
            "BASH_ENV": self.stubs,
            "_M_DIR": events,
            "_M_BASE": str(outputs),
            "_M_BASH": self.request["bash"],
            "_M_FLIP": f"|{'|'.join(flips)}|",
        }
        if self.request["may_write"]:
            os.makedirs(self.request["directory"], exist_ok=True)
        # Background processes of the script keep `held` open; the poll waits for them.
        alive, held = os.pipe()
        with open(os.path.join(events, "stderr"), "wb+") as errors:
            process = subprocess.Popen(
                [self.request["bash"], self.script, *self.request["arguments"]],
                env=environment,
                cwd=self.request["directory"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                pass_fds=(held,),
            )
            os.close(held)
            try:
                status = process.wait(max(self.deadline - time.monotonic(), 0.1))
                still = select.poll()
                still.register(alive, select.POLLIN)
                still.poll(1000 * _BACKGROUND_S)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"it runs for more than {self.request['seconds']} s") from None
            finally:
                with suppress(OSError):
                    os.killpg(process.pid, 9)
                process.wait()
                os.close(alive)
            errors.seek(0)
            stderr = errors.read(1 << 16).decode(errors="replace")
        found = self._events(events)
        shutil.rmtree(events)
        return {"numbers": numbers, "flips": flips, "status": status, "stderr": stderr, "events": found}

    def _events(self, folder: str) -> list[list[str]]:
        """Return what stubs and conditions reported, each as a list of kind, file, line, key and words."""
        found = []
        for name in sorted((name for name in os.listdir(folder) if name.isdigit()), key=int):
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                words = file.read().split("\0")
            at = 0
            while at < len(words) - 1:
                count = int(words[at])
                found.append(words[at + 1 : at + 1 + count])
                at += 1 + count
        return found

    def explore(self) -> dict[str, Any]:
        """Run the script for both outcomes of each condition that the script alone does not decide."""
        executions: list[dict[str, Any]] = []
        known: dict[str, str] = {}
        pending: list[tuple[str, ...]] = [()]
        while pending:
            flips = pending.pop(0)
            pair = [self.run(numbers, flips) for numbers in _NUMBERS]
            if wanted := self._wanted(pair):
                return {"wanted": wanted}
            executions += pair
            new = {key: text for key, text in _undecided(*pair).items() if key not in known}
            known |= new
            pending += [(*flips, key) for key in new]
        return {"executions": executions, "places": known}

    def _wanted(self, pair: list[dict[str, Any]]) -> list[str]:
        """Return the variables and paths that the script missed in the first run and the request does not give."""
        asked = {"unbound variable": dict[str, None](), "No such file or directory": dict[str, None]()}
        for match in _ERROR.finditer(pair[0]["stderr"]):
            asked[match["why"]][match["what"]] = None
        names = [name for name in asked["unbound variable"] if re.fullmatch(r"[A-Za-z_]\w*", name)]
        paths = [os.path.join(self.request["directory"], path) for path in asked["No such file or directory"]]
        known = {*self.request["unset"], *self.request["variables"], *self.request["absent"], *self.request["files"]}
        return [each for each in [*names, *paths] if each not in known]


def _undecided(first: dict[str, Any], second: dict[str, Any]) -> dict[str, str]:
    """Return the places of stubs, and of conditions on files or on what differs between runs, each with its text."""
    seen = [[event for event in execution["events"] if event[0] == "if"] for execution in (first, second)]
    values = [
        {key: [event[5:] for event in events if event[3] == key] for key in {e[3] for e in events}} for events in seen
    ]
    places = {event[3]: " ".join(event[4:])[:80] for event in first["events"] if event[0] == "run"}
    places |= {event[3]: f"the output of {' '.join(event[4:])[:60]}" for event in first["events"] if event[0] == "out"}
    for event in seen[0]:
        if _OF_FILES.search(event[4]) or values[0].get(event[3]) != values[1].get(event[3]):
            places[event[3]] = event[4][:80]
    return places


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return `executions` (the runs) and `places` (texts of what was flipped), or what else is `wanted`, or an `error`.

    The request: `bash`, `stubs`, `script` (its path), `files` (texts by path), `absent` (paths that are not there),
    `arguments`, `variables`, `unset` (names of variables), `given`, `directory`, `seconds`, `max_runs`, `may_write`.
    """
    try:
        return Recorder(request).explore()
    except TimeoutError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.stdin.read()))))
