"""The loop of docs/tutorials/own-loop.md as a notebook: its cells run inside the event loop of the kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.support import REPOSITORY
from tests.e2e.test_tutorials import BLOCK, after_first_run
from tests.helpers.beside import install_beside

PAGE = REPOSITORY / "docs" / "tutorials" / "own-loop.md"
# A start that fails first: its processes are gone, and the kernel can go on.
FAILS = """\
import psutil
try:
    megarl.Session("configs/run/sums-rl.yaml", ["run.name=fails", "cluster.engine_start_timeout_s=0.01"])
except megarl.errors.WorkerError as error:
    print(error)
else:
    raise AssertionError("the engines started")
ended, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)
assert not left, left
"""


def run_cells(directory: Path, *sources: str, timeout_s: float) -> str:
    """Run the cells of a notebook in a kernel, in this directory; what the last one printed."""
    cells = [
        {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": s} for s in sources
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (directory / "loop.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "MEGARL_RUN_ID"}
    paths = (install_beside("notebook.txt", directory / "site"), REPOSITORY)
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "IPYTHONDIR": str(directory / "ipython")}
    done = subprocess.run(
        [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", "loop.ipynb"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = json.loads((directory / "loop.ipynb").read_text(encoding="utf-8"))["cells"][-1]["outputs"]
    return "".join("".join(output.get("text", "")) for output in outputs)


# Cells that fail or are interrupted in the midst of a session, and what is then left of it.
MIDST = (
    """\
import os, signal, threading
import numpy as np, psutil
import megarl, megarl.errors
from megarl.types import Row

def opened():
    return megarl.Session("configs/run/sums-rl.yaml", ["run.name=midst"], with_engines=False)

def ended(processes):
    return not psutil.wait_procs(processes, timeout=20)[1]

tokens = np.arange(5, 25, dtype=np.int64)
row = Row(uid="0", sample_index=0, token_ids=tokens, num_prompt_tokens=4, loss_mask=np.ones(16, dtype=np.bool_))
""",
    """\
try:
    with opened() as session:
        processes = psutil.Process().children(recursive=True)
        session.logprobs([row])
        raise KeyError("mine")
except KeyError:
    assert processes and ended(processes)
""",
    """\
session = opened()
threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        session.logprobs([row])
except KeyboardInterrupt:
    assert len(session.logprobs([row])) == 1
""",
    """\
processes = psutil.Process().children(recursive=True)
session = opened()
assert processes and ended(processes)
assert len(session.logprobs([row])) == 1
session.close()
assert ended(psutil.Process().children(recursive=True))
print("done")
""",
)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cell_that_fails_or_is_interrupted_leaves_nothing_that_hinders_the_next(tmp_path: Path) -> None:
    after_first_run(tmp_path)
    assert run_cells(tmp_path, *MIDST, timeout_s=580).endswith("done\n")


@pytest.mark.timeout(300)
def test_the_tutorials_loop_runs_in_a_notebook(tmp_path: Path) -> None:
    after_first_run(tmp_path)
    blocks = {title: text for _, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8"))}
    (tmp_path / "reward.py").write_text(blocks["reward.py"], encoding="utf-8")
    printed = run_cells(tmp_path, "import megarl, megarl.errors", FAILS, blocks["own_loop.py"], timeout_s=280)
    assert [line[:7] for line in printed.splitlines() if line.startswith("step")] == ["step 1:", "step 2:", "step 3:"]
