"""The bench of verifiers: its items, and its limits."""

from collections import Counter
from dataclasses import replace

from megarl_lab.bench.verify import OURS, TRL, VerifierRate, faults, make_items


def test_hostile_items_are_as_many_as_was_said() -> None:
    items = make_items(100, 0.04, seed=0)
    assert Counter(item.kind == "hostile" for item in items) == {True: 4, False: 96}
    assert all(item.gold in item.response for item in items if item.kind == "gold")
    assert make_items(100, 0.04, seed=0) == items


def test_limits() -> None:
    good = [
        VerifierRate(contender=name, rate=rate, per_second=speed, slowest_s=2.9, wrong_golds=0, equal=5, both=5)
        for rate, ours in ((0.0, 15.0), (0.01, 30.0))
        for name, speed in ((OURS, ours), (TRL, 10.0))
    ]
    assert faults(good) == []
    bad = [replace(good[0], per_second=14.0), good[1], replace(good[2], wrong_golds=1, slowest_s=3.1), good[3]]
    assert faults(bad) == [
        "1.40 × TRL, expected 1.5 × at 0%",
        "1 golds called wrong at 1%",
        "a verdict after 3.1 s at 1%",
    ]
