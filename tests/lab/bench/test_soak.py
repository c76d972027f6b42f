"""Slopes of what grows in long runs, and the files that are counted."""

from pathlib import Path

import numpy as np
import pytest

from megarl_lab.bench.soak import Growth, count_files, growth, noise_of, tables


def test_noise_is_twice_the_standard_error_of_a_slope() -> None:
    """That of independent values of deviation 1 is 2 / sqrt(Σ (x − mean)²), by hand 2 / sqrt(n (n² − 1) / 12)."""
    rng, n = np.random.default_rng(1), 400
    steps, values = np.arange(n), rng.standard_normal(n)
    assert noise_of(steps, values, 0.0) == pytest.approx(2 / np.sqrt(n * (n**2 - 1) / 12), rel=0.4)
    assert noise_of(steps, 3.0 + 2.0 * steps, 2.0) == pytest.approx(0.0, abs=1e-9)


def test_only_the_later_half_counts() -> None:
    warming = [(step, min(step, 50) + 0.0) for step in range(100)]
    found = growth("synchronous", "driver", "private", warming)
    assert (found.slope, found.last, found.num_steps) == (0.0, 50.0, 99)


def test_a_slope_beyond_its_noise_has_a_star() -> None:
    common = {"run": "agent", "what": "private", "num_steps": 9, "last": 3 * 2.0**20}
    rows = tables(
        [
            Growth(of="driver", slope=2048.0, noise=1024.0, **common),
            Growth(of="engine_0", slope=-512.0, noise=1024.0, **common),
        ]
    )
    assert rows[1].split()[:8] == ["agent", "driver", "9", "3", "2.00", "±", "1.00*"][:8]
    assert rows[2].split()[:7] == ["agent", "engine_0", "9", "3", "-0.50", "±", "1.00"]


def test_files_are_counted_by_what_lies_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name, size in (("a/x", 3), ("a/y", 4), ("b", 5)):
        (tmp_path / name).write_bytes(bytes(size))
    assert count_files({"RUN/": tmp_path}) == {"RUN/a": (2, 7), "RUN/b": (1, 5)}
    assert count_files({"all": tmp_path}) == {"all": (3, 12)}


def test_a_file_that_goes_meanwhile_does_not_end_a_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(3))

    def gone(path: Path) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "lstat", gone)
    assert count_files({"all": tmp_path}) == {"all": (1, 0)}
