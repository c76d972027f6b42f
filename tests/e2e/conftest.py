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


# Of a file, not of the package: files of tests that open a cluster of their own may come next in the same process.
@pytest.fixture(scope="module")
def cluster(model: Path, engine_process: RankPool) -> Iterator[Cluster]:
    """A live cluster whose engine was started on `model`."""
    with Cluster(small_config(model)) as cluster:
        yield cluster
