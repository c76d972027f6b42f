"""Waits for Ray have limits that leave out the time for which this process is stopped."""

import ast

import pytest
import ray
from ray.exceptions import GetTimeoutError

from megarl.cluster import remotes
from tests.unit.test_import_rules import read_sources


@pytest.mark.parametrize(("stopped_s", "outcome"), [(0.0, "late"), (100.0, "came")])
def test_time_of_a_stop_does_not_count(stopped_s: float, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own limit has passed three times, by a clock of the machine; the awake clock has seen 6 s or none."""
    waits: list[float] = []

    def get(refs: object, timeout: float) -> str:
        waits.append(timeout)
        if stopped_s and len(waits) == 4:
            return "came"
        raise GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(remotes, "awake_s", lambda: 0.0 if stopped_s else sum(waits))
    if outcome == "late":
        with pytest.raises(GetTimeoutError):
            remotes.got([], 5.0)
        assert waits == [2.0, 2.0, 2.0]
    else:
        assert remotes.got([], 5.0) == outcome


def test_no_other_wait_for_ray_has_a_limit_of_its_own() -> None:
    calls = [
        (str(source.path), ast.unparse(node))
        for source in read_sources()
        for node in source.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "wait")
        if ast.unparse(node.func) in ("ray.get", "ray.wait")
    ]
    limited = [path for path, call in calls if "timeout=" in call and "timeout=0)" not in call]
    assert limited == ["cluster/remotes.py"]
