"""One step explained: weights, signals, shares and times by hand, words, picture and place in the report."""

from math import log
from pathlib import Path

import numpy as np
import pytest
import yaml

from megarl.cli import main
from megarl.record.metrics import JsonlSink, MetricsLogger, RunPaths
from megarl.record.rollouts import RolloutRecord, write_rollouts
from megarl.record.timeline import Interval, append_timeline
from megarl.record.turns import Turn
from megarl.report import write_report
from megarl.report.run import load_runs
from megarl.report.step import StepExplanation, explain_step

CONFIG = {
    "algo": {
        "aggregation": "seq-mean-token-mean",
        "correction": {"name": "icepop", "low": 0.4, "high": 5.0},
    },
    "rollout": {"num_samples": 2},
    "trainer": {"prompts_per_step": 4},
}


def sample(
    uid: str,
    index: int,
    *,
    engine: tuple[float | None, ...],
    trainer: tuple[float, ...] = (),
    advantage: tuple[float, ...] = (),
    correct: bool = False,
    turns: tuple[Turn, ...] = (),
) -> RolloutRecord:
    """A sample whose probabilities are given; its tokens are t0, t1, …"""
    return RolloutRecord(
        step=3,
        uid=uid,
        sample_index=index,
        data_source="sums",
        prompt="1+1=?",
        response="",
        ground_truth="2",
        reward=float(correct),
        finish_reason="stop",
        num_prompt_tokens=1,
        num_response_tokens=len(engine),
        correct=correct,
        tokens=tuple(f"t{i}" for i in range(len(engine))),
        rollout_logprobs=tuple(None if p is None else log(p) for p in engine),
        old_logprobs=tuple(map(log, trainer)),
        advantage=advantage,
        turns=turns,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Three steps; in the third, group a has a right and a wrong answer, b two right ones, and c was not trained on."""
    paths = RunPaths(tmp_path / "made")
    paths.root.mkdir()
    paths.config.write_text(yaml.safe_dump(CONFIG))
    with MetricsLogger([JsonlSink(paths.metrics)]) as log_metrics:
        for step, seconds in ((1, 5.0), (2, 5.0), (3, 10.0)):
            more = {"is/accept_frac": 0.75, "actor/grad_norm": 4.0, "actor/pg_clipfrac": 0.0125} if step == 3 else {}
            log_metrics.log(step, {"timing_s/step": seconds, "critic/score/mean": 0.5, **more})
    talk = tuple(Turn(author=a, text="", num_tokens=n) for a, n in (("policy", 1), ("environment", 1), ("policy", 2)))
    write_rollouts(
        paths.rollouts(3),
        [
            # ρ = 1 and 0.5.
            sample("a", 0, engine=(0.5, 0.5), trainer=(0.5, 0.25), advantage=(1.0, 1.0), correct=True),
            sample("b", 0, engine=(0.5,), trainer=(0.5,), advantage=(0.0,), correct=True),
            sample("c", 0, engine=(0.5, 0.5)),
            # ρ = 1, none for what the environment said, 8 (which is rejected) and 1.
            sample(
                "a",
                1,
                engine=(0.5, None, 0.1, 0.8),
                trainer=(0.5, 1.0, 0.8, 0.8),
                advantage=(-1.0, 0.0, -1.0, -1.0),
                turns=talk,
            ),
            sample("b", 1, engine=(0.5,), trainer=(0.5,), advantage=(0.0,), correct=True),
        ],
    )
    times = (
        ("step", "step", 100, 110),
        ("trainer", "gen", 100, 107),
        ("trainer", "update_actor", 107, 109),
        ("trainer", "sync", 109, 110),
        ("engine 0", "generate", 100, 107),
        ("engine 1", "generate", 100, 104),
    )
    append_timeline(
        paths.timeline,
        [Interval(lane=lane, name=name, start_s=start, end_s=end, step=3) for lane, name, start, end in times],
    )
    return paths


def explained(paths: RunPaths, step: int = 3) -> StepExplanation:
    (loaded,) = load_runs([paths.root])
    return explain_step(loaded, paths, step)


def test_signals_are_advantage_times_weight_times_share_of_the_row(run: RunPaths) -> None:
    """Row a/0 has two loss tokens, a/1 three: signals are A·w/2 and A·w/3; rows of a group stand together."""
    found = explained(run)
    assert found.rows == ("a/0", "a/1", "b/0", "b/1", "c/0")
    expected = ([0.5, 0.25], [-1 / 3, 0, 0, -1 / 3], [0], [0], [0, 0])
    for signal, by_hand in zip(found.signals, expected, strict=True):
        np.testing.assert_allclose(signal, by_hand, rtol=1e-5)


def test_groups_tokens_and_what_became_of_them(run: RunPaths) -> None:
    """Pulls are 0.5·0.5, 0.25·0.75, 0.5/3 and 0.2/3, together 0.6708; of 10 tokens 4 taught."""
    found = explained(run)
    assert [(group.uid, group.num_right, group.share) for group in found.groups] == [
        ("a", 1, 1),
        ("b", 2, 0),
        ("c", 0, 0),
    ]
    assert [(token.row, token.place) for token in found.tokens] == [("a/0", 0), ("a/0", 1), ("a/1", 0), ("a/1", 3)]
    assert [token.share for token in found.tokens] == pytest.approx([0.37267, 0.27950, 0.24845, 0.09938], abs=1e-4)
    assert found.tokens[1].weight == pytest.approx(0.5)
    assert found.fates == {
        "only read": 0.1,
        "row did not train": 0.2,
        "advantage 0": 0.2,
        "rejected by the correction": 0.1,
        "taught": 0.4,
    }


def test_words_say_what_taught_what_was_taken_and_what_limited(run: RunPaths) -> None:
    words = dict(explained(run).sentences)
    assert words["groups"].startswith("1 of 3 taught (5 of 8 samples recorded); 2 of the others had only right or only")
    assert (
        "53% of the signal made tokens likelier, 47% less likely; the tenth with the largest pull had 37%"
        in (words["tokens"])
    )
    assert words["taken away"] == (
        "the correction rejected 25.0% of tokens; the ratio's clip held 1.25% of tokens, mean over updates; "
        "the gradient's norm, 4, was clipped at 1"
    )
    assert words["time"] == (
        "10 s, 2 times the median step; gen 70%, update_actor 20%, sync 10%; engines worked 55% of it, engine 0 3 s "
        "longer than the first to end. Limit: samples and rewards"
    )


def test_what_moved_is_named(run: RunPaths) -> None:
    with MetricsLogger([JsonlSink(run.metrics)]) as log_metrics:
        ratios = {"layer_0": 2e-4, "layer_1": 5e-4, "head": 3e-4}
        log_metrics.log(3, {f"actor/update_ratio/{name}": ratio for name, ratio in ratios.items()})
    found = explained(run)
    assert found.moved == ratios
    assert (
        dict(found.sentences)["moved"] == "layer_1 most, by 5.00e-04 of its weights' norm, layer_0 least, by 2.00e-04"
    )


def test_a_step_without_samples_or_that_never_was(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert dict(explained(run, 2).sentences)["groups"] == "not recorded; set logging.rollout_every_steps=1"
    with pytest.raises(SystemExit) as ended:
        main(["explain-step", str(run.root), "9"])
    assert ended.value.code == 2
    assert "no training step 9; expected one from 1 to 3" in capsys.readouterr().err


def test_a_correction_that_a_plugin_brought_is_left_out(run: RunPaths) -> None:
    run.config.write_text(yaml.safe_dump({**CONFIG, "algo": {"correction": {"name": "mine"}}}))
    found = explained(run)
    assert "weights of correction and aggregation are left out" in dict(found.sentences)["tokens"]
    np.testing.assert_allclose(found.signals[0], [1, 1])


def test_command_and_report_write_words_and_picture(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain-step", str(run.root), "3"])
    assert "Limit: samples and rewards" in capsys.readouterr().out
    assert (run.root / "step_3.png").read_bytes()[1:4] == b"PNG"
    page = write_report(run.root).html.read_text("utf-8")
    assert "<h2>Step 3 explained</h2>" in page
    assert "Which tokens carried the gradient" in page
    assert "data:image" not in page
