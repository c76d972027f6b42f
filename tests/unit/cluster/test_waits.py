"""Waits for Ray have limits that leave out the time for which this process is stopped."""

import pytest
import ray
from ray.exceptions import GetTimeoutError

from megarl.cluster import remotes


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
