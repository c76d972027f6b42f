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


def cell(source: str) -> dict[str, object]:
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": source}


@pytest.mark.timeout(300)
def test_the_tutorials_loop_runs_in_a_notebook(tmp_path: Path) -> None:
    after_first_run(tmp_path)
    blocks = {title: text for _, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8"))}
    (tmp_path / "reward.py").write_text(blocks["reward.py"], encoding="utf-8")
    cells = [cell("import megarl, megarl.errors"), cell(FAILS), cell(blocks["own_loop.py"])]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (tmp_path / "loop.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "MEGARL_RUN_ID"}
    paths = (install_beside("notebook.txt", tmp_path / "site"), REPOSITORY)
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run(
        [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", "loop.ipynb"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = json.loads((tmp_path / "loop.ipynb").read_text(encoding="utf-8"))["cells"][-1]["outputs"]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert [line[:7] for line in printed.splitlines() if line.startswith("step")] == ["step 1:", "step 2:", "step 3:"]
