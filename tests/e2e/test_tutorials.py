"""Pages do what they say: the files of their fenced blocks are written and the commands run, in an empty directory.

By default a page is followed up to the first commands that train, of which only the plan is made; the long tests follow
it to its end.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model
from tests.e2e.support import REPOSITORY

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', flags=re.MULTILINE | re.DOTALL)
DOCS = REPOSITORY / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "\n```bash" in page.read_text(encoding="utf-8")]
FIRST = "quickstart"
# What these do before they train, unit tests do too.
LONG = ("async", "environments", "own-data", "own-loop")
TIMEOUT_S = 1500.0


def training(commands: str) -> list[str]:
    """The commands of a block that start ranks or engines."""
    lines = commands.replace("\\\n", " ").splitlines()
    starts = r"megarl (quickstart|train|eval) (?!.*--(dry-run|explain))|python own_loop"
    return [line for line in lines if re.match(starts, line)]


def after_first_run(directory: Path) -> Path:
    """Make a directory as the first run leaves it, but that its model has learned nothing; return it."""
    root = directory / "runs" / "sums-seed0"
    generate(TASKS.get("sums"), root / "data", GenerateConfig(seed=0, num_sft=64, num_train=256, num_val=16))
    make_tiny_model(root / "sft" / "export", TinyModelConfig(), seed=0)
    return directory


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return after_first_run(tmp_path_factory.mktemp("start"))


def follow(page: Path, start: Path, directory: Path, *, whole: bool) -> None:
    """Write the page's files and run its commands in `directory`, where nothing of the checkout lies."""
    if page.stem != FIRST:
        (directory / "runs").symlink_to(start / "runs")
    # Not a part of the run that the tests themselves may have.
    environment = {key: value for key, value in os.environ.items() if key != "MEGARL_RUN_ID"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            file = directory / title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            continue
        assert language == "bash", f"{page.name}: a block of {language} without a title is neither file nor command"
        if shortened := not whole and training(text):
            text = "\n".join(f"{line} --dry-run" for line in shortened if line.startswith("megarl train"))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        if shortened:
            return


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long if page.stem in LONG else ()) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_a_page_up_to_its_first_training(page: Path, start: Path, tmp_path: Path) -> None:
    follow(page, start, tmp_path, whole=False)


@pytest.mark.long
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(training(block[2]) for block in BLOCK.findall(page.read_text()))],
    ids=lambda page: page.stem,
)
def test_a_page_to_its_end(page: Path, start: Path, tmp_path: Path) -> None:
    follow(page, start, tmp_path, whole=True)
