"""What all tests share: pools of ranks, in which order tests run, and where."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.helpers.rank_pool import RankPool

# What these compare with is installed apart: make test-conformance.
collect_ignore = ["conformance"]
# Ray's processes would wait for the tests that run beside them.
os.environ.update({"RAY_worker_niceness": "0"})


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """World size → its pool; processes start when they are first used and end with the session."""
    pools: dict[int, RankPool] = {}
    with ExitStack() as stack:

        def pool(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size))
            return pools[world_size]

        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs of the whole program take minutes: they begin first."""
    items.sort(key=lambda item: "e2e" not in item.path.parts)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """See `tests.helpers.scheduling`."""
    from tests.helpers.scheduling import FilesAndRuns

    return FilesAndRuns(config, log)
