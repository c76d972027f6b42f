"""The leak study's table and picture, and the runs of the studies in configs/study."""

from collections import Counter
from pathlib import Path

import pytest

from megarl.algos.cpo.methods import CPO_METHODS, formula_set
from megarl_lab.study.leak import Behavior, Policy, write_results
from megarl_lab.study.queue import load_study, run_config

REPOSITORY = Path(__file__).parents[3]


def policy(name: str, seed: int, step: int, score: float, copied: float | None) -> Policy:
    behavior = Behavior(
        score=score,
        unworked=0.5,
        copied=copied,
        answer_gain_right=0.0,
        answer_gain_wrong=-1.0,
        step_gain_right=0.0,
        step_gain_wrong=0.0,
        hinted_score=1.0,
        hinted_unworked=0.25,
    )
    return Policy(name=name, seed=seed, step=step, behavior=behavior)


def test_table_and_picture(tmp_path: Path) -> None:
    policies = [
        *(policy(name, seed, 0, 0.4, None) for name in ("grpo", "cpo") for seed in (0, 1)),
        *(policy("grpo", seed, 10, 0.5 + seed / 10, 0.25) for seed in (0, 1)),
        policy("cpo", 0, 10, 0.7, None),
    ]
    json_file, table, picture = write_results(tmp_path, policies)
    head, _, *rows = table.read_text().splitlines()
    assert head.startswith("| algorithm | step | seeds | score | unworked | copied | answer_gain_right |")
    assert rows[0].startswith("| before | 0 | 1 | 0.400 | 0.500 |  | 0.000 |")
    # The mean of 0.5 and 0.6, and their sample standard deviation.
    assert rows[1].startswith("| grpo | 10 | 2 | 0.550 ± 0.071 | 0.500 ± 0.000 | 0.250 ± 0.000 |")
    assert rows[2].startswith("| cpo | 10 | 1 | 0.700 | 0.500 |  |")
    assert json_file.is_file()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_wrapper_study_has_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with the suffix are the same methods but for naive_qwen3, which changes nothing under GRPO."""
    monkeypatch.chdir(REPOSITORY)
    study = load_study(REPOSITORY / "configs/study/wrappers.yaml")
    wanted = {name for name in CPO_METHODS if not name.endswith("_qwen3")} - {"none"} | {"grpo"}
    configs = [run_config(study, run) for run in study.runs]
    assert Counter(config.algo.name for config in configs) == dict.fromkeys(wanted, 3)
    assert len({config.run.seed for config in configs}) == 3
    for config in configs:
        method = config.algo.cpo.method
        assert config.algo.name == ("grpo" if method == "none" else method)
        assert formula_set(config.algo.cpo) == CPO_METHODS.get(method).default


def test_the_leak_study_begins_where_make_train_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    study = load_study(REPOSITORY / "configs/study/leak.yaml")
    configs = [run_config(study, run) for run in study.runs]
    assert {config.model.path for config in configs} == {"runs/sums-seed0/sft/export"}
    assert set(Counter(config.algo.name for config in configs).values()) == {2}
    assert all(c.checkpoint.keep_last >= c.trainer.total_steps / c.checkpoint.every_steps for c in configs)
