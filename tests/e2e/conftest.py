"""What tests on live processes share: checkpoints, data, one cluster at a time, a process for engines alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cluster.cluster import Cluster
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, TaskFiles, generate
from tests.e2e.support import small_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.rank_pool import RankPool


@pytest.fixture(scope="package")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, by `tied_head` or `both_heads`."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), tied=request.param)


@pytest.fixture(scope="package")
def sums(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    """Demonstrations, prompts and validation prompts of the sums task."""
    sizes = GenerateConfig(seed=0, num_sft=64, num_train=32, num_val=4)
    return generate(TASKS.get("sums"), tmp_path_factory.mktemp("sums"), sizes)


@pytest.fixture(scope="package")
def engine_process() -> Iterator[RankPool]:
    """A process outside any cluster, for `tests.e2e.engines`."""
    with RankPool(1, timeout_s=120.0) as pool:
        # Started now, so that it does not inherit the id of a run.
        pool.run(_process_id)
        yield pool


def _process_id(_: object) -> int:
    return os.getpid()


class HeldCluster:
    """The live cluster of several files: as long as tests of `SHARING` follow each other, on the same model."""

    def __init__(self) -> None:
        self._open: tuple[Path, Cluster] | None = None

    def on(self, model: Path) -> Cluster:
        if self._open is None or self._open[0] != model:
            self.close()
            self._open = model, Cluster(small_config(model))
        return self._open[1]

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


HELD = HeldCluster()
SHARING = {f"test_{name}.py" for name in ("algorithms", "public_data", "sync", "train", "truncated_sampling")}


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.name not in SHARING:
        HELD.close()


@pytest.fixture(scope="module")
def cluster(model: Path, engine_process: RankPool) -> Cluster:
    """A live cluster whose engine was started on `model`."""
    return HELD.on(model)
