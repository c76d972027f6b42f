"""A comparison of synthetic runs with numbers by hand: groups, differences, notes, table, picture, tool."""

import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.image import imread

from megarl.errors import ConfigError, DataError
from megarl.record.metrics import JsonlSink, MetricsLogger
from megarl.report.run import load_runs
from megarl_lab.comparison.groups import Comparison, GroupResult, compare, group_runs
from megarl_lab.comparison.table import comparison_text, mean_curve
from tools import compare_runs

STEPS = 6


def write_run(
    root: Path, algo: str, seed: int, final: float, *, steps: int = STEPS, prompts: int = 100, **settings: object
) -> Path:
    """A run validated at steps 0 (0.4), 3 (halfway) and the last; reward 0.1 · step."""
    run = root / f"{algo}-seed{seed}"
    run.mkdir(parents=True)
    config = {
        "run": {"name": run.name, "dir": str(root), "seed": seed},
        "algo": {"name": algo},
        "trainer": {"total_steps": STEPS, **settings},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    scores = {0: 0.4, 3: (0.4 + final) / 2, steps: final}
    with MetricsLogger([JsonlSink(run / "metrics.jsonl")]) as log:
        for step in range(steps + 1):
            if step:
                log.log(
                    step,
                    {
                        "critic/score/mean": 0.1 * step,
                        "mismatch/abs_mean": 1e-6 * step,
                        "timing_s/step": 2.0 + seed,
                    },
                )
            if step in scores:
                log.log(step, {"val/test_score/sums": scores[step], "val/num_prompts/sums": prompts})
    return run


def write_group(root: Path, algo: str, finals: Sequence[float], **settings: object) -> list[Path]:
    return [write_run(root, algo, seed, final, **settings) for seed, final in enumerate(finals)]


def compared(paths: Sequence[Path], by: str = "algo", baseline: str | None = None) -> Comparison:
    return compare(group_runs(load_runs(paths), by), baseline)


@pytest.fixture
def study(tmp_path: Path) -> list[Path]:
    """Two algorithms of three seeds, and one of a single seed."""
    return [
        *write_group(tmp_path, "grpo", [0.90, 0.94, 0.98]),
        *write_group(tmp_path, "ppo", [0.80, 0.84, 0.88]),
        *write_group(tmp_path, "gspo", [0.5]),
    ]


def by_name(comparison: Comparison) -> dict[str, GroupResult]:
    return {group.name: group for group in comparison.groups}


def test_groups(study: list[Path]) -> None:
    groups = by_name(compared(study))
    assert list(groups) == ["grpo", "ppo", "gspo"]
    grpo = groups["grpo"]
    assert [run.seed for run in grpo.runs] == [0, 1, 2]
    assert grpo.after.mean == pytest.approx(0.94)
    assert grpo.after.std == pytest.approx(0.04)
    assert (grpo.after.min, grpo.after.max) == (0.90, 0.98)
    assert grpo.before is not None
    assert grpo.before.mean == pytest.approx(0.4)
    assert grpo.before.std == pytest.approx(0)
    # Steps 2 to 6 of 0.1 · step; all six of 1e-6 · step; 2, 3 and 4 seconds.
    assert grpo.reward == pytest.approx(0.4)
    assert grpo.mismatch_nats == pytest.approx(3.5e-6)
    assert grpo.step_s == pytest.approx(3.0)


def test_binomial_standard_error(study: list[Path]) -> None:
    """Of 100 answers: √(.09/100), √(.0564/100), √(.0196/100), and of 0.5 exactly 0.05."""
    groups = by_name(compared(study))
    assert groups["grpo"].binomial_std_error == pytest.approx(math.sqrt((0.0009 + 0.000564 + 0.000196) / 3))
    assert groups["gspo"].binomial_std_error == pytest.approx(0.05)


def test_differences_and_verdicts(study: list[Path]) -> None:
    """One comparison has a p-value, 0.0376 as in the test of Welch's test, so Holm changes nothing."""
    groups = by_name(compared(study))
    assert (groups["grpo"].difference, groups["grpo"].verdict) == (None, "baseline")
    ppo = groups["ppo"]
    assert ppo.difference is not None
    assert ppo.difference.mean == pytest.approx(-0.10)
    assert ppo.difference.std_error == pytest.approx(0.03266, abs=1e-5)
    assert ppo.adjusted_p == pytest.approx(0.0376, abs=1e-4)
    assert ppo.verdict == "clearly lower"
    assert groups["gspo"].verdict == "one seed: cannot tell"


def test_pairs_of_seeds_show_what_the_spread_of_seeds_hides(tmp_path: Path) -> None:
    """Seeds are 0.2 apart, differences 0.01, 0.02 and 0.03: p = 0.074 by two degrees of freedom."""
    paths = [*write_group(tmp_path, "grpo", (0.5, 0.7, 0.9)), *write_group(tmp_path, "cpo", (0.51, 0.72, 0.93))]
    groups = group_runs(load_runs(paths), "algo")
    alone, paired = (compare(groups, paired=paired).groups[1] for paired in (False, True))
    assert alone.difference is not None
    assert paired.difference is not None
    assert alone.difference.std_error == pytest.approx(math.sqrt((0.2**2 + 0.21**2) / 3))
    assert paired.difference.mean == pytest.approx(0.02)
    assert paired.difference.std_error == pytest.approx(0.01 / math.sqrt(3))
    assert paired.adjusted_p == pytest.approx(0.0742, abs=1e-4)
    # Student's t of two degrees of freedom at 0.975 is 4.3027.
    assert paired.difference.least == pytest.approx(4.3027 * 0.01 / math.sqrt(3), rel=1e-4)
    assert "paired t-test" in comparison_text(compare(groups, paired=True))


def test_a_score_may_be_the_mean_of_the_last_validations(tmp_path: Path) -> None:
    """Of the last two of 0.4, (0.4 + final)/2 and final, with 100 answers each."""
    paths = write_group(tmp_path, "grpo", (0.6, 0.8)) + write_group(tmp_path, "cpo", (0.8, 1.0))
    groups = group_runs(load_runs(paths), "algo")
    grpo, cpo = compare(groups, last=2).groups
    assert [run.after.score for run in grpo.runs] == pytest.approx([0.55, 0.7])
    assert grpo.runs[0].after.num_prompts == 200
    assert cpo.difference is not None
    assert cpo.difference.mean == pytest.approx(0.15)
    assert by_name(compare(groups, last=1))["grpo"].runs[0].after.score == 0.6
    with pytest.raises(DataError, match=r"grpo-seed0: has 3 validation scores .*, expected at least 4"):
        compare(groups, last=4)


def test_pairs_need_a_common_seed(tmp_path: Path) -> None:
    paths = [write_run(tmp_path, "grpo", 0, 0.5), write_run(tmp_path, "cpo", 1, 0.5)]
    with pytest.raises(DataError, match=r"cpo: got seeds \[1\], expected some of \[0\], those of grpo"):
        compare(group_runs(load_runs(paths), "algo"), paired=True)


def test_the_same_difference_among_more_comparisons_is_within_noise(study: list[Path], tmp_path: Path) -> None:
    """Holm doubles 0.0376 once there is a second comparison, though that one shows nothing."""
    more = write_group(tmp_path, "cpo", [0.90, 0.94, 0.99])
    groups = by_name(compared([*study, *more]))
    assert groups["ppo"].adjusted_p == pytest.approx(0.0752, abs=2e-4)
    assert groups["ppo"].verdict == groups["cpo"].verdict == "within noise"


def test_another_baseline(study: list[Path]) -> None:
    comparison = compared(study, baseline="ppo")
    assert comparison.baseline == "ppo"
    assert by_name(comparison)["grpo"].verdict == "clearly higher"
    with pytest.raises(ConfigError, match="baseline: got 'sac', expected one of: grpo, ppo, gspo"):
        compared(study, baseline="sac")


def test_seeds_without_spread(tmp_path: Path) -> None:
    paths = [*write_group(tmp_path, "grpo", [0.9, 0.9]), *write_group(tmp_path, "ppo", [0.9, 0.9])]
    assert by_name(compared(paths))["ppo"].verdict == "equal"
    paths = [*paths[:2], *write_group(tmp_path, "gspo", [0.8, 0.8])]
    assert by_name(compared(paths))["gspo"].verdict == "no spread over seeds: cannot tell"


def test_two_runs_of_one_seed_are_refused(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, "grpo", 0, 0.9) for name in ("a", "b")]
    message = "a/grpo-seed0 and b/grpo-seed0 are both grpo with seed 0, expected a run per seed; leave one out, or"
    with pytest.raises(DataError, match=message):
        compared(paths)


def test_groups_by_name(tmp_path: Path) -> None:
    paths = write_group(tmp_path, "grpo-wide", [0.9, 0.8]) + write_group(tmp_path, "grpo", [0.9])
    assert {g.name: len(g.runs) for g in compared(paths, by="name").groups} == {"grpo-wide": 2, "grpo": 1}


def test_notes_of_unequal_budgets_and_unfinished_runs(tmp_path: Path) -> None:
    paths = write_group(tmp_path, "grpo", [0.9], prompts_per_step=32)
    paths += write_group(tmp_path, "ppo", [0.9], prompts_per_step=64, num_epochs=2, steps=4)
    assert compared(paths).notes == (
        "ppo-seed0 is not finished: 4 of 6 steps",
        "trainer.prompts_per_step differs: 32 (grpo); 64 (ppo)",
        "trainer.num_epochs differs: not set (grpo); 2 (ppo)",
    )


def test_a_run_without_validation_is_refused(tmp_path: Path) -> None:
    (path,) = write_group(tmp_path, "grpo", [0.9])
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(line for line in lines if "val/" not in line))
    with pytest.raises(DataError, match="grpo-seed0: has no validation score"):
        compared([path])


def test_table(study: list[Path]) -> None:
    lines = comparison_text(compared(study)).splitlines()
    cells = [line.split() for line in lines[:4]]
    assert cells[0][:6] == ["algorithm", "seeds", "before", "after", "sd", "min-max"]
    assert cells[1][:7] == ["grpo", "3", "0.400", "0.940", "0.040", "0.900-0.980", "0.024"]
    assert lines[2].endswith("0.400   3.5e-06    3.00  -0.100 ± 0.033, p 0.038: clearly lower, clear from 0.091")
    assert cells[3][:7] == ["gspo", "1", "0.400", "0.500", "-", "-", "0.050"]
    assert any("Holm-corrected for 1 comparison(s)" in line for line in lines)


def test_mean_curve_has_the_steps_of_all() -> None:
    assert mean_curve([{0: 0.2, 5: 0.5, 10: 1.0}, {0: 0.4, 10: 0.5}]) == pytest.approx({0: 0.3, 10: 0.75})


@pytest.fixture
def keep_handlers() -> Iterator[None]:
    """Signal handlers are the test session's again afterwards."""
    handlers = {
        signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("keep_handlers")
def test_tool(
    study: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "here"
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *map(str, study), "--baseline", "ppo", "--out", str(out)])
    compare_runs.main()
    assert "difference from ppo" in capsys.readouterr().out
    data = json.loads((out / "comparison.json").read_text())
    assert data["baseline"] == "ppo"
    grpo = data["groups"][0]
    assert (grpo["name"], grpo["verdict"]) == ("grpo", "clearly higher")
    assert grpo["runs"][0]["after"] == pytest.approx({"step": 6, "score": 0.9, "num_prompts": 100, "std_error": 0.03})
    picture = imread(out / "comparison.png")
    assert min(picture.shape[:2]) > 300
    # Not blank.
    assert np.unique(picture.reshape(-1, picture.shape[-1]), axis=0).shape[0] > 20


@pytest.mark.usefixtures("keep_handlers")
def test_tool_on_what_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as exit_info:
        compare_runs.main()
    assert exit_info.value.code == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
