"""Rank pools that a whole session shares."""

import gc
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.budget import Budget
from tests.helpers.forks import Forks
from tests.helpers.leftovers import unchanged
from tests.helpers.rank_pool import RankPool
from tests.helpers.wide import LONG, WIDE

# torch's stores look up the names of addresses. Where a name server loses a question, each such look-up took 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Several tests and their processes share the cores, where threads of one would spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes says more of the machine's load than of the code. Every session draws other examples.
for name, max_examples in {"few": 10, "long": 100}.items():
    settings.register_profile(
        name, deadline=None, max_examples=max_examples, suppress_health_check=[HealthCheck.too_slow]
    )
# Under nohup, processes that tests start would ignore hangups too; a handler is not inherited.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
# What these compare with is installed apart: make test-conformance.
collect_ignore = ["conformance"]
# What imports and collection leave in memory stays there: looking through it for garbage took a twelfth of a session.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=1, help="how many processes run tests, a file each at a time")
    parser.addoption("--wide", help="which wide tests run: 1 or absent: all, empty: none, K/N: each N-th file's")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.option.markexpr == "long" else "few")
    budget = Budget(config)
    config.pluginmanager.register(budget)
    if config.option.forks > 1:
        forks = Forks(config.option.forks, lambda file: FOLDERS.get(file, file), lambda: budget.seconds, budget.add)
        config.pluginmanager.register(forks)


def is_of_part(test: str, part: str) -> bool:
    """Whether a wide test's file belongs to part K/N of them; 1 is all, nothing is none.

    >>> sum(is_of_part("tests/test_a.py::test_b", f"{k}/8") for k in range(8))
    1
    """
    number, _, parts = part.partition("/")
    return bool(part) and (zlib.crc32(test.split("::")[0].encode()) - int(number)) % int(parts or 1) == 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark and order tests. Properties belong to the default ones and, with more examples, to the long ones too."""
    for item in items:
        if item.nodeid.startswith(tuple(LONG)):
            item.add_marker("long")
        elif item.nodeid.startswith(tuple(WIDE)):
            item.add_marker("wide")
        if config.option.markexpr == "long" and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("long")
    if (part := config.option.wide) is not None:
        left_out = {item for item in items if item.get_closest_marker("wide") and not is_of_part(item.nodeid, part)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    # Live processes come last in their folder: others of its tests end all children of this process, or look at them.
    first: dict[Path, int] = {}
    for index, item in enumerate(items):
        first.setdefault(item.path.parent, index)
    items.sort(key=lambda item: (first[item.path.parent], item.nodeid.split("::")[0] in FOLDERS))


def pytest_collection_finish(session: pytest.Session) -> None:
    # What vLLM and earlier runs have found out and keep in the user's home, a first run does not have.
    os.environ["XDG_CACHE_HOME"] = str(session.config._tmp_path_factory.getbasetemp() / "cache")  # type: ignore[attr-defined]
    gc.freeze()
    # Tests leave little garbage, and the usual thresholds look for it thousands of times.
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


# Files whose tests share live processes, by folder: those of a folder start once, in one worker.
LIVE = {
    "tests/e2e": ("algorithms", "public_data", "rounded_engines", "sync", "train", "truncated_sampling"),
    "tests/unit/cluster": ("calls", "deaths", "episodes", "role_workers", "strangers"),
}
FOLDERS = {f"{folder}/test_{name}.py": folder for folder, names in LIVE.items() for name in names}
# These import vLLM, which takes a process as long as a hundred other tests.
FOLDERS |= dict.fromkeys(
    (
        f"tests/unit/{name}.py"
        for name in (
            "config/test_check_engine",
            "rollout/test_drafted_tokens",
            "rollout/test_engine_spec",
            "rollout/test_rounded_weights",
            "sync/test_engine_shards",
        )
    ),
    "vllm",
)


# These read all sources, which one process parses once.
FOLDERS |= dict.fromkeys(
    (
        f"tests/unit/{name}.py"
        for name in (
            "host/test_http_replies",
            "test_encodings",
            "test_import_rules",
            "test_names",
            "test_sentences",
            "test_typing",
        )
    ),
    "sources",
)


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """The next test may run in the same process, or not."""
    with unchanged():
        yield


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
