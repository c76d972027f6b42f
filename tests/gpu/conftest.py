"""Processes on CUDA devices, and the checkpoints they load."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.cuda import missing_devices
from tests.helpers.gpu_ranks import use_local_layers
from tests.helpers.rank_pool import RankPool


def pytest_report_header() -> str:
    """What the tests run on."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"GPU tests on: {', '.join(names)}" if names else f"GPU tests are skipped: {missing_devices(1)}"


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[Callable[[int], RankPool]]:
    """Number of devices → a pool with a rank on each."""
    pools: dict[int, RankPool] = {}
    with ExitStack() as stack:

        def pool(num_devices: int) -> RankPool:
            if num_devices not in pools:
                pools[num_devices] = stack.enter_context(RankPool(num_devices, timeout_s=180.0, device="cuda"))
            return pools[num_devices]

        yield pool


@pytest.fixture(scope="session")
def local_pool() -> Iterator[Callable[[int], RankPool]]:
    """As `gpu_pool`, with megarl's own layers even where Transformer Engine is installed."""
    pools: dict[int, RankPool] = {}
    with ExitStack() as stack:

        def pool(num_devices: int) -> RankPool:
            if num_devices not in pools:
                pools[num_devices] = stack.enter_context(RankPool(num_devices, timeout_s=180.0, device="cuda"))
            # Anew each time: after a failure the processes are others.
            pools[num_devices].run(use_local_layers)
            return pools[num_devices]

        yield pool


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(dtype, seed) → a model directory, made once."""
    made: dict[tuple[str, int], Path] = {}

    def get(*, dtype: str = "float32", seed: int = 0) -> Path:
        if (dtype, seed) not in made:
            path = tmp_path_factory.mktemp("checkpoint")
            made[dtype, seed] = make_checkpoint(path, tied=True, dtype=dtype, num_layers=4, seed=seed)
        return made[dtype, seed]

    return get
