"""Rank pools that a whole session shares."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.rank_pool import RankPool

# torch's stores look up the names of addresses. Where a name server loses a question, each such look-up took 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Several tests and their processes share the cores, where threads of one would spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes says more of the machine's load than of the code. Every session draws other examples.
settings.register_profile("megarl", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("megarl")
# What these compare with is installed apart: make test-conformance.
collect_ignore = ["conformance"]
# What imports and collection leave in memory stays there: looking through it for garbage took a twelfth of a session.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


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
