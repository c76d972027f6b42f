"""Users' code is tried in a process of its own: what it does there harms nothing, and is named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.config.load import dump, with_overrides
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.run.evaluation.inputs import EvalRequest, open_eval_inputs
from megarl.run.session_inputs import open_session_inputs
from megarl.train import rehearsal
from megarl.train.rehearsal import Findings, Trial, rehearse, try_out
from tests.helpers.waiting import wait_until

HEAD = """from megarl.algos.filters import GROUP_FILTERS
from megarl.algos.kl import KL_ESTIMATORS
from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLossTerms
"""
# Lines 5 to 28, as each part begins after an empty line.
PARTS = """
@GROUP_FILTERS.register("raises")
def raises(group, cfg):
    raise ValueError("my own mistake")

@GROUP_FILTERS.register("leaves")
def leaves(group, cfg):
    raise SystemExit("bye")

@GROUP_FILTERS.register("lacks")
def lacks(group, cfg):
    import surely_missing.part

@GROUP_FILTERS.register("forks")
def forks(group, cfg):
    import os
    os.fork()
    return True

@GROUP_FILTERS.register("prints")
def prints(group, cfg):
    print("x" * 2_000_000)
    return True

class Echo:
    async def reply(self, action): ...

def solve(prompt, base_url): ...

def compute_score(data_source, solution_str, ground_truth):
    return {"scor": 1.0}
"""


def tried(file: Path, *overrides: str) -> Findings:
    config = with_overrides(Config(), [f"algo.plugins=['{file}']", *overrides])
    return try_out(Trial(config=config, every=True, file=str(file)))


def test_every_part_of_a_file_is_tried_whatever_the_others_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + PARTS)
    found = tried(file)
    assert [about.rpartition(": ")[2] for about in found.tried] == [
        str(file),
        *(f"filter '{name}'" for name in ("raises", "leaves", "lacks", "forks", "prints")),
        "environment 'Echo'",
        "agent 'solve'",
        "reward function 'compute_score'",
    ]
    assert [each.removeprefix(f"{file}:") for each in found.mistakes if "solve" not in each] == [
        "7: filter 'raises': ValueError: my own mistake; correct it",
        "11: filter 'leaves': SystemExit: bye; correct it",
        "15: filter 'lacks': ModuleNotFoundError: No module named 'surely_missing'; install surely_missing, or add its "
        "directory to PYTHONPATH",
        "17: filter 'forks': a process that it forked returns as well; end that by os._exit",
        "29: environment 'Echo': Echo: Echo has no start; derive it from megarl.environments.Environment",
        "33: reward function 'compute_score': returned {'scor': 1.0}, expected a finite number, or a mapping with "
        "'score', a finite number, and, if there is 'acc', a number or a boolean for it; correct it",
    ]
    assert (
        "users' code printed 4.0 MB when it was tried, and would in every step; its last: 'xxx"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import time; time.sleep(900)", r"mine\.py:3: reward function 'reward_func': has not returned within run\.re"),
        ("import os; os._exit(3)", r"mine\.py:3: reward function 'reward_func': ended its process with exit code 3"),
    ],
)
def test_code_that_never_returns_is_named(tmp_path: Path, body: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"\n\ndef reward_func(queries, prompts, labels):\n    {body}\n")
    (mistake,) = tried(file, "run.rehearsal_s=2").mistakes
    assert mistake.startswith(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(mistake)


STOPPED = """
import sys
from megarl.host import clock
clock.TICK_S, clock.MOST_S = 0.05, 0.2
from megarl.config.load import with_overrides
from megarl.config.schema import Config
from megarl.train.rehearsal import Trial, try_out
config = with_overrides(Config(), [f"rewards.custom.path={sys.argv[1]}", "run.rehearsal_s=1"])
print(try_out(Trial(config=config)).mistakes)
"""


def test_the_time_of_a_stop_does_not_count_and_no_proxy_is_asked_for_this_host(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text(
        "import os, pathlib, time\nassert '127.0.0.1' in os.environ['NO_PROXY'].split(',')\n"
        "pathlib.Path(__file__ + '.pid').write_text(str(os.getpid()))\ntime.sleep(0.3)\n"
        "def reward_func(queries, prompts, labels):\n    return [1.0]\n"
    )
    command = [sys.executable, "-c", STOPPED, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        tried = Path(f"{file}.pid")
        wait_until(lambda: tried.exists() and tried.read_text() != "", "the trial", timeout_s=60.0)
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            for pid in (asking.pid, int(tried.read_text())):
                os.kill(pid, signum)
            # The machine's clock is the point: there is nothing to wait for.
            time.sleep(1.5 * (signum == signal.SIGSTOP))
        assert asking.communicate()[0] == "[]\n"


def test_what_has_passed_is_tried_again_once_a_file_that_it_imports_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    helper, file = tmp_path / "helper_of_mine.py", tmp_path / "mine.py"
    helper.write_text("KEEP = True\n")
    file.write_text(
        f"{HEAD}\n@GROUP_FILTERS.register('mine')\ndef mine(group, cfg):\n    import helper_of_mine\n"
        "    return helper_of_mine.KEEP\n"
    )
    config = with_overrides(Config(), [f"algo.plugins=['{file}']", "algo.filter.names=[mine]"])
    assert rehearse(config) is config
    monkeypatch.setattr(rehearsal, "try_out", lambda trial: pytest.fail("it was tried again"))
    rehearse(config)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    helper.write_text("KEEP = 'yes'\n")
    with pytest.raises(ConfigError, match=r"mine\.py:5: filter 'mine': it returned 'yes', expected True to keep a gro"):
        rehearse(config)
    rehearse(with_overrides(config, ["run.rehearsal_s=null"]))


def test_sessions_and_evaluations_try_users_code_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of the model but its config.json is read."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "mine.py").write_text("")
    config = with_overrides(Config(), [f"algo.plugins=['{tmp_path}/mine.py']", f"model.path={tmp_path}/model"])
    (tmp_path / "run.yaml").write_text(dump(config))
    found = Findings(tried=[], mistakes=["mine.py:3: my own mistake"], warnings=[], files={}, tools={})
    monkeypatch.setattr(rehearsal, "try_out", lambda trial: found)
    request = EvalRequest(
        model=tmp_path / "model", data=(tmp_path / "x.jsonl",), out=tmp_path / "out", run_file=tmp_path / "run.yaml"
    )
    for opened in (
        lambda: open_session_inputs(config, with_engines=False, with_reference=False),
        lambda: open_eval_inputs(request),
    ):
        with pytest.raises(ConfigError, match=r"^mine\.py:3: my own mistake$"):
            opened()


def test_the_command_says_what_is_well_and_what_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[Any]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def good(solution_str, ground_truth):\n    return 1.0\n\ndef other(a):\n    return 1\n")
    main(["check-plugin", f"{file}:good"])
    assert capsys.readouterr().out == (
        f"{file}:1: reward function 'good': well\n"
        f"warning: {file}:1: reward function 'good' is flat: it gave 1.0 for right and wrong answers alike; check that "
        "it compares them\n"
    )
    with pytest.raises(SystemExit) as left:
        main(["check-plugin", f"{file}:other"])
    assert left.value.code == 1
    assert capsys.readouterr().out.startswith(f"mistake: {file}: other is neither registered as a part of")
