"""Language models as judges in a run: one that the run serves on devices of its own, and the policy itself."""

import json
import string
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from megarl.record.metrics import RunPaths, read_metrics
from megarl.record.rollouts import read_rollouts
from megarl.rewards import score
from megarl_lab.recipes.tasks.generate import TaskFiles
from tests.e2e.cli_run import START_S, leftovers, processes, start
from tests.e2e.support import RUN_FILE, SMALL
from tests.helpers.checkpoints import make_checkpoint

# An untrained model writes no numbers, so each letter and digit stands for one; the last in the text counts.
LABELS = {letter: index / 100 for index, letter in enumerate(string.ascii_lowercase + string.digits)}
JUDGE = {
    "template": "{{ response }}",
    "verdict": {"pattern": "([a-z0-9])", "labels": LABELS},
    "sampling": {"temperature": 1.0, "max_tokens": 64},
    "dry_run": False,
}


def worth(said: str) -> float:
    """The number of the last letter or digit."""
    return next(LABELS[letter] for letter in reversed(said.casefold()) if letter in LABELS)


def is_locked(run_id: str) -> bool:
    """Whether the judge's server answers; if so, it asks for a key, which no command line shows."""
    commands = {}
    for pid in processes(run_id):
        with suppress(psutil.NoSuchProcess):
            commands[pid] = psutil.Process(pid).cmdline()
    servers = [(pid, command) for pid, command in commands.items() if "megarl.rollout.judge_process" in command]
    if not servers:
        return False
    pid, command = servers[0]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
    try:
        statuses = [httpx.get(f"{url}{path}", timeout=60).status_code for path in ("/v1/models", "/metrics", "/health")]
        statuses.append(httpx.post(f"{url}/invocations", json={"prompt": "a"}, timeout=60).status_code)
    except httpx.ConnectError:
        return False
    assert statuses == [401, 401, 401, 401]
    key = psutil.Process(pid).environ()["VLLM_API_KEY"]
    assert not any(key in word for words in commands.values() for word in words)
    return True


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_served_judge_and_the_policy_judge_a_run(tmp_path: Path, sums: TaskFiles) -> None:
    base = make_checkpoint(tmp_path / "base", tied=True)
    served = make_checkpoint(tmp_path / "served", tied=False)
    rewards = {
        "manager": "hybrid",
        "hybrid": {
            "parts": {
                "rule": {"manager": "rule"},
                "served": {"manager": "judge", "judge": "served", "weight": 0.5},
                "self": {"manager": "judge", "judge": "self", "weight": 0.25},
            }
        },
        "judges": {"served": {**JUDGE, "server": "own"}, "self": {**JUDGE, "use_policy": True}},
        "judge_servers": {"own": {"model": str(served), "args": {"dtype": "float32", "max-model-len": 256}}},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(RUN_FILE.read_text()), "rewards": rewards}))
    where = [f"run.dir={tmp_path}", "run.name=judged", f"model.path={base}", f"data.train=[{sums.train}]"]
    steps = ["trainer.total_steps=2", "trainer.prompts_per_step=4", "rollout.num_samples=4"]
    others = ["logging.rollout_every_steps=1", "logging.num_rollouts=16", "data.val=[]"]
    (tmp_path / "cwd").mkdir()
    run = start(tmp_path / "cwd", "train", str(file), *SMALL, *where, *steps, *others)
    try:
        run_id = run.run_id()
        run.wait_until(lambda: is_locked(run_id), "a server that asks for a key")
        assert run.process.wait(START_S) == 0, run.stderr.read_text()
        assert leftovers(run_id) == []
    finally:
        run.end()
    paths = RunPaths(tmp_path / "judged")
    metrics = {record.step: record.metrics for record in read_metrics(paths.metrics)}
    for step in (1, 2):
        records = read_rollouts(paths.rollouts(step))
        assert records
        for record in records:
            told = json.loads(record.details)
            rule = score("megarl/sums", record.response.removesuffix("<|im_end|>"), record.ground_truth, {}).score
            assert (told["served/score"], told["self/score"]) == (worth(told["served_said"]), worth(told["self_said"]))
            mixture = rule + 0.5 * told["served/score"] + 0.25 * told["self/score"]
            assert record.reward == pytest.approx(mixture, abs=1e-9)
        assert len({json.loads(record.details)["served_said"] for record in records}) > 1
        for name in ("served", "self"):
            assert metrics[step][f"reward/{name}/requests"] == 16.0
            assert metrics[step][f"reward/{name}/unjudged_frac"] < 0.5
            assert metrics[step][f"reward/{name}/tokens"] > 16.0
