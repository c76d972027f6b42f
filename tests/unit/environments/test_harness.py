"""Programs of coding agents solve samples: a program of ours in place of a real one, see tests/harnesses."""

import asyncio
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.harness import Assignment, claude_code, codex
from megarl.errors import ConfigError
from tests.helpers.agent_talk import Talk, converse

# A whole harness: it asks once, and writes the answer to a file of the workspace.
PROGRAM = """
import json, os, sys, urllib.request
task, url = sys.stdin.read(), os.environ["OPENAI_BASE_URL"] + "/chat/completions"
given = sorted(path for path in os.listdir() if not path.startswith("."))
said = f"{task} {given} {sys.argv[1:]} {os.path.isdir(os.environ['HOME'])}"
body = json.dumps({"messages": [{"role": "user", "content": said}]}).encode()
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
"""
HARNESS = """
import sys
from megarl.environments.harness import Launch

def mine(given):
    return Launch(command=[sys.executable, {file!r}, *given.options], variables={{"MINE": "1"}})
"""
CHECK = "import sys; sys.exit(open('answer.txt').read() != open('expected.txt').read())"


def solve(tmp_path: Path, *turns: str, extra_info: dict[str, Any] | None = None, **arguments: Any) -> Talk:
    program, mine = tmp_path / "program.py", tmp_path / f"harness_{tmp_path.name}.py"
    program.write_text(PROGRAM)
    mine.write_text(HARNESS.format(file=str(program)))
    template = tmp_path / "template"
    (template / "src").mkdir(parents=True)
    settings = {"check": [sys.executable, "-c", CHECK], "workspace": str(template)} | arguments
    entry = {"harness": f"{mine}:mine", **settings}
    return asyncio.run(
        converse(entry, *turns, kind="harness", extra_info=extra_info or {"check_files": {"expected.txt": "3"}})
    )


@pytest.mark.parametrize(("answer", "reward"), [("3", 1.0), ("4", 0.0)])
def test_the_reward_is_whether_the_check_passes_in_the_workspace(tmp_path: Path, answer: str, reward: float) -> None:
    files = {"files": {"src/a.py": "x = 1\n", "notes.md": "go"}, "check_files": {"expected.txt": "3"}}
    talk = solve(tmp_path, answer, extra_info=files, options=["--fast"])
    assert (talk.last.done, talk.last.reward, talk.last.details["correct"]) == (True, reward, reward), talk.last
    # The files of the check come after the agent.
    assert "1+2? ['notes.md', 'src'] ['--fast'] True" in talk.text
    assert [*(tmp_path / "template").rglob("*")] == [tmp_path / "template" / "src"]


@pytest.mark.parametrize("path", ["../out.txt", "/tmp/out.txt", "src/../../out.txt"])
def test_files_of_a_row_stay_in_the_workspace(tmp_path: Path, path: str) -> None:
    reply = solve(tmp_path, "3", extra_info={"files": {path: "x"}}).last
    assert f"extra_info.files has '{path}', expected a path within the workspace" in reply.reason


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"harness": "claude-kode"}, "did you mean 'claude-code'"),
        ({"check": ["no-such-check"]}, ".check: there is no program 'no-such-check'"),
        ({"check": []}, ".check is empty"),
        ({"workspace": "no/where"}, ".workspace: no/where is no directory"),
        ({"options": ["--key=sk-abcdefghijklmnopqrstuvwxyz123456"]}, "secret"),
    ],
)
def test_what_is_missing_is_told_before_a_sample(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        solve(tmp_path, "3", **arguments)


def test_the_commands_name_the_endpoint_of_the_sample() -> None:
    given = Assignment(
        task="Fix it.", workspace=Path("w"), home=Path("h"), base_url="http://127.0.0.1:1/s/a/v1", options=("--x",)
    )
    command = codex(given).command
    settings = tomllib.loads(command[command.index("--config", 3) + 1])
    assert settings["model_providers"]["megarl"]["base_url"] == given.base_url
    assert (command[-2:], codex(given).variables["CODEX_HOME"]) == (("--x", "-"), "h")
    claude = claude_code(given)
    assert claude.command[0] == "claude"
    assert {claude.variables[f"ANTHROPIC_{name}MODEL"] for name in ("", "DEFAULT_OPUS_", "DEFAULT_SONNET_")} == {
        "policy"
    }
