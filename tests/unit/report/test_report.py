"""The report of a synthetic run: its headline, numbers, tables, figures and errors."""

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from megarl.config.schema import Config, RunConfig
from megarl.errors import DataError
from megarl.host import streams
from megarl.record.columns import tables_of
from megarl.record.episodes import FAILURES
from megarl.record.metrics import JsonlSink, MetricsLogger, MetricsRecord, RunPaths, WarningsSink
from megarl.record.recorder import RunRecorder
from megarl.record.rollouts import RolloutRecord, write_rollouts
from megarl.report import ReportPaths, write_report
from megarl.report.curves import smooth, time_per_phase
from megarl.report.figures import _shown
from megarl.report.html import visible_text
from megarl.report.run import Series, build_series, load_runs, run_labels
from megarl.report.style import spread
from megarl.report.summary import (
    SAMPLED,
    MeanScore,
    format_duration,
    headline,
    validation_change,
    validation_curve,
)
from megarl.types.judged import Trouble
from tests.helpers.recorded_run import write_validation
from tests.helpers.reward_items import item

NUM_STEPS = 40
STEP_S = 51.0
# Validation every 10 steps: 75/200 right before RL, 187/200 after.
SAMPLED_SCORES = {0: 0.375, 10: 0.61, 20: 0.8, 30: 0.905, 40: 0.935}
GREEDY_SCORES = {0: 0.05, 10: 0.655, 20: 0.83, 30: 0.93, 40: 0.96}
CONFIG = {
    "run": {"name": "sums", "seed": 0},
    "model": {"path": "models/tiny-sft", "dtype": "float32"},
    "data": {"train": ["data/train.parquet"], "val": ["data/val.parquet"]},
    "algo": {"name": "grpo", "advantage": {"estimator": "grpo", "norm_by_std": True}},
    "actor": {"layout": {"tp": 2, "dp": 1}, "optimizer": {"lr": 1e-4}},
    "rollout": {"num_samples": 8, "temperature": 1.0, "max_response_tokens": 64, "replay_dir": None},
    "trainer": {"total_steps": NUM_STEPS, "prompts_per_step": 32},
}


def step_metrics(step: int, rng: np.random.Generator, final_score: float) -> dict[str, float]:
    """One training step as a run of the sums task logs it."""
    done = 1.0 - math.exp(-step / 12.0)
    reward = 0.38 + (final_score - 0.38) * done + rng.normal(0.0, 0.025)
    phases = {
        "gen": 21.0 + 5.0 * done,
        "reward": 0.4,
        "old_log_prob": 6.0,
        "adv": 0.01,
        "update_actor": 17.0,
        "sync": 1.4,
    }
    noisy = {f"timing_s/{name}": seconds * rng.uniform(0.95, 1.05) for name, seconds in phases.items()}
    if step % 10 == 0:
        noisy["timing_s/testing"] = 12.0
    return noisy | {
        "timing_s/step": sum(noisy.values()) + 1.5,
        "critic/score/mean": reward,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "actor/entropy": 0.42 - 0.34 * done + rng.normal(0.0, 0.01),
        "actor/grad_norm": 0.9 - 0.4 * done + abs(rng.normal(0.0, 0.15)),
        "actor/lr": 1e-4,
        "response_length/mean": 11.0 + 12.0 * done + rng.normal(0.0, 0.4),
        "response_length/max": 44.0 + rng.integers(0, 12),
        "response_length/min": 8.0,
        "mismatch/abs_mean": 2e-7 * rng.uniform(0.8, 1.3),
        "mismatch/abs_max": 4e-6 * rng.uniform(0.5, 2.0),
        "mismatch/k3": 3e-13 * rng.uniform(0.5, 2.0),
        "perf/tokens_per_s": 180.0 + rng.normal(0.0, 6.0),
        "memory/rss_gib/driver": 0.9 + 0.001 * step,
    }


def write_run(
    root: Path,
    *,
    config: Mapping[str, object] = CONFIG,
    num_steps: int = NUM_STEPS,
    sampled: Mapping[int, float] = SAMPLED_SCORES,
    greedy: Mapping[int, float] = GREEDY_SCORES,
    seed: int = 0,
) -> Path:
    """A run directory as training leaves it, without rollouts."""
    root.mkdir(parents=True)
    (root / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    (root / "versions.json").write_text(json.dumps({"python": "3.11.9", "torch": "2.13.0"}))
    rng = np.random.default_rng(seed)
    now_s = 1.7e9
    with MetricsLogger([JsonlSink(root / "metrics.jsonl")], clock=lambda: now_s) as logger:
        for step in range(num_steps + 1):
            if step > 0:
                now_s += STEP_S
                logger.log(step, step_metrics(step, rng, sampled.get(num_steps, 0.9)))
            validation = {"val/test_score/sums": sampled[step]} if step in sampled else {}
            if step in greedy:
                validation["val/test_score_greedy/sums"] = greedy[step]
            if validation:
                logger.log(step, validation | {"val/num_prompts/sums": 200.0})
    return root


def rollout(
    step: int, uid: str, reward: float, *, response: str = "5 12\n#### 12<|im_end|>", prompt: str = ""
) -> RolloutRecord:
    return RolloutRecord(
        step=step,
        uid=uid,
        sample_index=0,
        data_source="sums",
        prompt=prompt or f"<|im_start|>user\n5+7=? ({uid})<|im_end|>\n<|im_start|>assistant\n",
        response=response,
        ground_truth="12",
        reward=reward,
        finish_reason="stop",
        num_prompt_tokens=14,
        num_response_tokens=10,
        correct=reward >= 0.5,
    )


def test_samples_without_a_sound_verdict_are_shown(tmp_path: Path) -> None:
    """Shares over all steps and at the last one, and two examples of each kind, their text escaped."""
    root = write_run(tmp_path / "sums", num_steps=0)
    assert "sound verdict" not in write_report(root).html.read_text(encoding="utf-8")
    with MetricsLogger([JsonlSink(root / "metrics.jsonl")]) as logger:
        logger.log(3, {"reward/crashed_frac": 0.0, "reward/failed_frac": 0.5, "reward/style/unjudged_frac": 0.25})
        logger.log(4, {"reward/crashed_frac": 0.0, "reward/failed_frac": 0.0, "reward/style/unjudged_frac": 0.5})
    recorder = RunRecorder(Config(run=RunConfig(name="problems", dir=str(tmp_path))))
    troubles = [
        Trouble(
            item=item(f"p{i}", f"{i} < x", "8"), outcome="failed", reason=f"mine.py:{i}", output="said", judge="rule"
        )
        for i in (1, 2, 3)
    ]
    recorder.problems(3, troubles)
    recorder.paths.problems.rename(root / "reward_problems.jsonl")
    html = write_report(root).html.read_text(encoding="utf-8")
    parser = PageParser()
    parser.feed(html)
    shares = [row for row in parser.rows if "_frac" in row[0] and len(row) == 3]
    assert shares == [
        ["a function raised an exception (reward/failed_frac)", "25.00%", "0.00%"],
        ["style gave no verdict (reward/style/unjudged_frac)", "37.50%", "50.00%"],
    ]
    assert "rule: failed, 3 recorded" in html
    assert [f"mine.py:{i}</code></p>" in html for i in (1, 2, 3)] == [False, True, True]
    assert "3 &lt; x" in html


class PageParser(HTMLParser):
    """Collects tags, the text of each, table rows and everything a browser would load."""

    VOID = frozenset({"meta", "link", "img", "br", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.rows: list[list[str]] = []
        self.heading = ""

    @property
    def lines(self) -> list[str]:
        """Table rows as `cell | cell`."""
        return [" | ".join(row) for row in self.rows]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "h1" in self.open:
            self.heading += data.replace("\xa0", " ")
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data.strip()


def parse(html: str) -> PageParser:
    parser = PageParser()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


# sqrt(.375 · .625 / 200) = .03423; sqrt(.935 · .065 / 200) = .01743; their quadrature sum is .03842.
HEADLINE = "Validation score rose from 0.375 ± 0.034 before RL to 0.935 ± 0.017 after 40 steps (+0.560)."


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """But that of `report`, as it takes longer than a page."""
    monkeypatch.setattr("megarl.report.figures.write_png", lambda runs, path: path.touch())


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportPaths:
    return write_report(write_run(tmp_path_factory.mktemp("report") / "sums"))


def test_page_leads_with_the_result_in_words(report: ReportPaths) -> None:
    assert report.html.parts[-2:] == ("sums", "report.html")
    html = report.html.read_text(encoding="utf-8")
    page = parse(html)
    assert page.heading == HEADLINE
    # 40 steps × 51 s = 2040 s. Greedy: sqrt(.05 · .95 / 200) = .0154, sqrt(.96 · .04 / 200) = .0139.
    assert "40 steps in 34 min · validated on 200 prompts of sums · greedy decoding: 0.050 ± 0.015 → " in html
    assert "sums | sampled | 0.375 ± 0.034 | 0.935 ± 0.017 | +0.560 ± 0.038 | 0 → 40 | 200" in page.lines
    assert "sums | greedy | 0.050 ± 0.015 | 0.960 ± 0.014 | +0.910 ± 0.021 | 0 → 40 | 200" in page.lines
    assert "learning rate | 0.0001" in page.lines
    assert "torch | 2.13.0" in page.lines
    assert "rollout.replay_dir | none" in page.lines
    # Last step: 0.9 + 0.001 · 40.
    assert "memory/rss_gib/driver | 0.901 | 0.94 | 0.9205 | 0.901 | 0.94" in page.lines


def test_page_needs_no_network_and_its_figures_do_not_collide(report: ReportPaths) -> None:
    html = report.html.read_text(encoding="utf-8")
    page = parse(html)
    assert page.tags.count("svg") == 8
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert [target for target in page.loads if not target.startswith("#")] == []
    referenced = {target[1:] for target in page.loads} | set(re.findall(r"url\(#(\w+)\)", html))
    assert referenced
    assert all(page.ids.count(target) == 1 for target in referenced)


def test_png_holds_four_rows_of_two_panels(report: ReportPaths) -> None:
    # 2 × 5.6 inches wide, 4 × 2.9 + 2 × 0.23 (a title line and its margin) high, at 150 dots per inch.
    assert png_size(report.png) == (1680, 1809)


def test_recorded_samples_are_counted_and_lead_to_the_browser(tmp_path: Path) -> None:
    root = write_run(tmp_path / "sums", num_steps=0)
    paths = RunPaths(root)
    assert "recorded samples" not in write_report(root).html.read_text(encoding="utf-8")
    assert not paths.report_files.exists()
    write_rollouts(paths.rollouts(5), [rollout(5, "q1", 0.0), rollout(5, "q2", 1.0)])
    write_rollouts(paths.rollouts(20), [rollout(20, "q1", 1.0)])
    write_rollouts(paths.rollouts(40), [rollout(40, "q3", 1.0), rollout(40, "q4", 1.0)])
    write_validation(paths, 40, range(3), correct=False)
    html = write_report(root).html.read_text(encoding="utf-8")
    lines = parse(html).lines
    place = lines.index("samples of | step | recorded | right")
    assert lines[place + 1 : place + 5] == [
        "training | 5 | 2 | 1",
        "training | 40 | 2 | 2",
        "validation | 40 | 3 | 0",
        "validation, greedy | 40 | 3 | 0",
    ]
    assert "Browse 11 recorded samples" in html
    assert 'href="report/rollouts.html#in_phase=training&amp;step_min=5&amp;step_max=5"' in html
    assert paths.report_files.is_dir()


def test_a_run_with_hints_has_their_panels(tmp_path: Path) -> None:
    root = write_run(tmp_path / "sums", num_steps=0)
    shaped = replace(
        rollout(40, "q1", 1.0),
        tokens=("1<", "2"),
        hint_gain=(1.0, -4.0),
        base_advantage=(0.5, 0.5),
        advantage=(0.75, 0.25),
    )
    write_rollouts(RunPaths(root).rollouts(40), [shaped, rollout(40, "q2", 0.0)])
    signal = {"cpo/delta_mean": 0.1, "cpo/delta_right": 0.2, "cpo/delta_wrong": -0.3, "cpo/adv_delta_mean": 0.0}
    with MetricsLogger([JsonlSink(root / "metrics.jsonl")]) as logger:
        logger.log(41, signal | {"cpo/adv_delta_right": 0.1, "cpo/adv_delta_wrong": -0.1})
    html = write_report(root).html.read_text(encoding="utf-8")
    for title in ("CPO: what the hint tells", "CPO: change of advantages", "CPO: changes of single tokens"):
        assert title in html


def test_a_run_with_conversations_has_their_panels(tmp_path: Path) -> None:
    root = write_run(tmp_path / "calculator", num_steps=0)
    metrics = {"environment/turns/mean": 2.0, "environment/turns/min": 1.0, "environment/turns/max": 3.0}
    metrics |= {"environment/tool_calls": 0.5, "perf/environment_reply_s": 0.1, "environment/failed_frac": 0.25}
    metrics |= {f"environment/{kind}": float(i) for i, kind in enumerate(FAILURES)}
    with MetricsLogger([JsonlSink(root / "metrics.jsonl")]) as logger:
        logger.log(41, metrics)
    html = write_report(root).html.read_text(encoding="utf-8")
    for title in ("Turns of a conversation", "Tool calls", "Time of environments", "Failed conversations"):
        assert title in html


def test_comparison_names_every_run_with_before_after_and_gain(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "seed0")
    second = write_run(tmp_path / "a" / "seed1", sampled={0: 0.4, 40: 0.975}, greedy={}, seed=1)
    third = write_run(tmp_path / "b" / "cpo", sampled={0: 0.42, 40: 0.4}, greedy={}, seed=2)
    paths = write_report(first, [second, third])
    html = paths.html.read_text(encoding="utf-8")
    page = parse(html)
    # sqrt(.4 · .6 / 200) = .0346, sqrt(.975 · .025 / 200) = .0110, together .0364;
    # sqrt(.42 · .58 / 200) = .0349, together with .0346: .0492.
    assert "seed0 | 0.375 ± 0.034 | 0.935 ± 0.017 | +0.560 ± 0.038 | 0 → 40 | 200" in page.lines
    assert "seed1 | 0.400 ± 0.035 | 0.975 ± 0.011 | +0.575 ± 0.036 | 0 → 40 | 200" in page.lines
    assert "cpo | 0.420 ± 0.035 | 0.400 ± 0.035 | -0.020 ± 0.049 | 0 → 40 | 200" in page.lines
    assert page.heading == f"seed0: {HEADLINE}"
    reward_figure, validation_figure = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)[:2]
    for figure in (reward_figure, validation_figure):
        assert all(f">{label}</text>" in figure for label in ("seed0", "seed1", "cpo"))


def test_report_of_a_killed_run_covers_what_is_there(tmp_path: Path) -> None:
    root = write_run(tmp_path / "sums", num_steps=12)
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "time_s": 17000')
    html = write_report(root).html.read_text(encoding="utf-8")
    # sqrt(.61 · .39 / 200) = .0345; 12 steps × 51 s = 612 s.
    assert (
        parse(html).heading
        == "Validation score rose from 0.375 ± 0.034 before RL to 0.610 ± 0.034 after 10 steps (+0.235)."
    )
    assert "12 of 40 steps in 10 min" in html


def test_report_after_step_zero_alone(tmp_path: Path) -> None:
    root = write_run(tmp_path / "sums", num_steps=0)
    page = parse(write_report(root).html.read_text(encoding="utf-8"))
    assert page.heading == (
        "Validation score 0.375 ± 0.034 at step 0, not measured again. No training step has finished yet."
    )
    assert page.tags.count("svg") == 1


@pytest.mark.filterwarnings("error:Data has no positive")
def test_figures_of_one_step_without_mismatch_and_with_two_data_sources(tmp_path: Path) -> None:
    root = pooled_run(tmp_path / "run", {"sums": (0.5, 100), "a_rather_long_data_source": (0.9, None)})
    with MetricsLogger([JsonlSink(root / "metrics.jsonl")]) as logger:
        zero = {"mismatch/abs_mean": 0.0, "mismatch/k3": 0.0, "actor/update_ratio/layer_0": 0.0}
        logger.log(1, {"critic/score/mean": 0.5, "timing_s/gen": 2.0, **zero})
    html = write_report(root).html.read_text(encoding="utf-8")
    assert parse(html).tags.count("svg") == 5  # reward, validation, mismatch, layers, time
    for text in ("zero at every step", "gen 2 s", "sums", "a_rather_long_dat…"):
        assert re.search(rf">{text}</text>", html.replace("  ", " ")), text


def test_headline_without_validation_is_the_reward(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "config.yaml").write_text("run: {seed: 0}\n")
    with MetricsLogger([JsonlSink(root / "metrics.jsonl")]) as logger:
        for step in range(1, 5):
            logger.log(step, {"critic/score/mean": step / 10})
        # (.1 + .2 + .3 + .4) / 4
        assert headline(load_runs([root])[0]).sentence == "Mean training reward: 0.250 over 4 step(s)."
        for step in range(5, 13):
            logger.log(step, {"critic/score/mean": step / 10})
    # (.1 + ... + .5) / 5 and (.8 + ... + 1.2) / 5.
    assert headline(load_runs([root])[0]).sentence == (
        "Mean training reward: 0.300 over the first 5 steps, 1.000 over the last 5."
    )


@pytest.mark.parametrize(("shares", "said"), [((1.0, 0.96), "98%"), ((1.0, 0.5), None)])
def test_a_report_says_that_nearly_all_responses_were_cut(
    tmp_path: Path, shares: tuple[float, ...], said: str | None
) -> None:
    (tmp_path / "config.yaml").write_text("run: {seed: 0}\n")
    with MetricsLogger([JsonlSink(tmp_path / "metrics.jsonl")]) as logger:
        for step, share in enumerate(shares, start=1):
            logger.log(step, {"critic/score/mean": 0.0, "response_length/clip_ratio": share})
    told = headline(load_runs([tmp_path])[0]).details[0]
    assert ("were cut" in told) == (said is not None)
    assert f"{said or ''} of the responses were cut at rollout.max_response_tokens" in told or said is None


def test_report_of_a_reward_models_training(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "judge")
    paths.root.mkdir()
    paths.config.write_text(yaml.safe_dump(CONFIG))
    with MetricsLogger([JsonlSink(paths.metrics)]) as log:
        log.log(0, {"val/reward_model/accuracy": 0.5})
        for step in (1, 2):
            log.log(step, {"reward_model/accuracy": 0.5 + 0.1 * step, "reward_model/loss": 0.7 - 0.1 * step})
        log.log(2, {"val/reward_model/accuracy": 0.75})
    page = parse(write_report(paths.root).html.read_text(encoding="utf-8"))
    assert page.heading == (
        "Share of held-out pairs that the reward model puts in order: 0.750 after step 2 (0.500 after step 0)."
    )
    assert page.tags.count("svg") == 2


def test_report_of_a_policys_training_on_preferences_without_held_out_pairs(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "dpo")
    paths.root.mkdir()
    paths.config.write_text(yaml.safe_dump(CONFIG))
    with MetricsLogger([JsonlSink(paths.metrics)]) as log:
        for step in (1, 2):
            means = {"loss": 0.7, "accuracy": 0.5 * step, "margin": 0.1, "reward_chosen": 0.2, "reward_rejected": 0.1}
            log.log(step, {f"preference/{name}": mean for name, mean in means.items()})
    html = write_report(paths.root).html.read_text(encoding="utf-8")
    page = parse(html)
    assert page.heading == (
        "Share of pairs of training batches whose chosen response the policy prefers: 1.000 after step 2 (0.500 after "
        "step 1)."
    )
    # Accuracy, margin, loss and rewards; the last has a line for each side.
    assert page.tags.count("svg") == 4
    for side in ("chosen", "rejected"):
        assert re.search(rf">{side}</text>", html)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        # 0.375 ± .034; two standard errors of the difference are about 0.097.
        (
            0.45,
            "did not clearly change: from 0.375 ± 0.034 before RL to 0.450 ± 0.035 after 40 steps (+0.075).",
        ),
        (0.2, "fell from 0.375 ± 0.034 before RL to 0.200 ± 0.028 after 40 steps (-0.175)."),
    ],
)
def test_headline_says_when_the_score_fell_or_did_not_move(tmp_path: Path, after: float, words: str) -> None:
    root = write_run(tmp_path / "run", sampled={0: 0.375, 40: after}, greedy={})
    assert headline(load_runs([root])[0]).sentence == f"Validation score {words}"


def test_directories_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere is not a run directory: expected a config\.yaml"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("run: {seed: 0}\n")
    with pytest.raises(DataError, match="no metrics at"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no metrics yet"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_s": 1.0, "metrics": {"a": 1.0}}\n')
    (tmp_path / "config.yaml").write_text("run: [")
    with pytest.raises(DataError, match="not valid YAML"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("just words")
    with pytest.raises(DataError, match="got a str, expected a mapping"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_labels_are_the_shortest_that_differ() -> None:
    assert run_labels([Path("runs/a"), Path("runs/b/")]) == ["a", "b"]
    assert run_labels([Path("x/seed0/run"), Path("x/seed1/run")]) == ["seed0/run", "seed1/run"]
    with pytest.raises(DataError, match="same run twice"):
        run_labels([Path("runs/a"), Path("runs/../runs/a")])


def pooled_run(root: Path, sources: Mapping[str, tuple[float, float | None]]) -> Path:
    """One validation at step 0: data source → (score, number of prompts)."""
    root.mkdir()
    (root / "config.yaml").write_text("{}\n")
    with MetricsLogger([JsonlSink(root / "metrics.jsonl")]) as logger:
        for name, (score, count) in sources.items():
            logger.log(0, {f"val/test_score/{name}": score})
            if count is not None:
                logger.log(0, {f"val/num_prompts/{name}": count})
    return root


def test_data_sources_are_pooled_by_their_numbers_of_prompts(tmp_path: Path) -> None:
    run = load_runs([pooled_run(tmp_path / "a", {"sums": (0.5, 100), "countdown": (0.9, 300)})])[0]
    (point,) = validation_curve(run, SAMPLED)
    assert point.num_prompts == 400
    assert point.score == pytest.approx(0.8)  # (50 + 270) / 400
    assert point.std_error == pytest.approx(0.02)  # sqrt(.8 · .2 / 400)
    assert validation_change(run, SAMPLED) is None


def test_unknown_numbers_of_prompts_pool_equally_without_an_error_bar(tmp_path: Path) -> None:
    run = load_runs([pooled_run(tmp_path / "a", {"sums": (0.5, None), "countdown": (0.9, 300)})])[0]
    (point,) = validation_curve(run, SAMPLED)
    assert (point.score, point.num_prompts, point.std_error) == (pytest.approx(0.7), None, None)
    assert str(MeanScore(step=0, score=-0.25, num_prompts=200)) == "-0.250"  # no share: no binomial error


def test_durations() -> None:
    assert [format_duration(s) for s in (42.4, 59.9, 2040.0, 3599.0, 7500.0)] == [
        "42 s",
        "60 s",
        "34 min",
        "1 h 00 min",
        "2 h 05 min",
    ]


def test_smoothing_is_a_centred_mean_cut_off_at_the_ends() -> None:
    assert smooth([1.0, 2.0, 6.0, 4.0]).tolist() == pytest.approx([1.5, 3.0, 4.0, 5.0])
    assert smooth([5.0]).tolist() == [5.0]
    # 70 steps: a window of 7, so 3 steps either side.
    line = [float(value) for value in range(70)]
    line[35] += 7.0
    assert smooth(line)[32:39].tolist() == pytest.approx([33.0, 34.0, 35.0, 36.0, 37.0, 38.0, 39.0])
    assert smooth(line)[31] == pytest.approx(31.0)
    # 1000 steps: the window stops at 25, so 12 steps either side.
    assert smooth([float(value) for value in range(1000)])[[0, 500, 999]].tolist() == [6.0, 500.0, 993.0]


def test_time_per_phase_sums_what_is_small_or_unclaimed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}\n")
    with MetricsLogger([JsonlSink(tmp_path / "metrics.jsonl")]) as logger:
        base = {
            "timing_s/step": 100.0,
            "timing_s/update_actor": 30.0,
            "timing_s/gen": 60.0,
            "timing_s/adv": 1.0,
        }
        logger.log(1, base)
        logger.log(2, base | {"timing_s/testing": 50.0, "timing_s/step": 150.0})
    steps, phases = time_per_phase(load_runs([tmp_path])[0])
    assert steps == [1, 2]
    # adv is 2 of 250 s, below 2 %; with the 9 s that no phase claims it is other.
    assert {name: column.tolist() for name, column in phases.items()} == {
        "gen": [60.0, 60.0],
        "update_actor": [30.0, 30.0],
        "testing": [0.0, 50.0],
        "other": [10.0, 10.0],
    }
    assert list(phases) == ["gen", "update_actor", "testing", "other"]


def test_direct_labels_move_apart_and_stay_inside() -> None:
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.52], 0.1) == pytest.approx([0.5, 0.6])
    assert spread([0.95, 0.97, 0.99], 0.1) == pytest.approx([0.8, 0.9, 1.0])
    assert spread([-0.2, 0.01], 0.1) == pytest.approx([0.0, 0.1])


def test_visible_text_keeps_newlines_and_escapes_comparisons() -> None:
    assert str(visible_text("1 < 2\n\tand 3 > 2")) == "1 &lt; 2\n\tand 3 &gt; 2"
    assert str(visible_text("<think>\x00\x7f")) == '<span class="token">&lt;think&gt;</span>␀␡'


def test_values_stand_under_the_pointer(report: ReportPaths) -> None:
    """A strip for each step of a curve, left to right; where a curve has held-out scores, both are told."""
    page = report.html.read_text(encoding="utf-8")
    figures = re.findall(r"<svg role.*?</svg>", page, re.DOTALL)
    validation = next(figure for figure in figures if 'aria-label="Validation score"' in figure)
    strips = re.findall(r'<rect class="step" x="([\d.]+)"[^>]*><title>([^<]*)</title>', validation)
    assert [title for _, title in strips] == [
        f"step {step}\nsampled: {score:.4g}\ngreedy: {GREEDY_SCORES[step]:.4g}"
        for step, score in SAMPLED_SCORES.items()
    ]
    assert [float(x) for x, _ in strips] == sorted(float(x) for x, _ in strips)
    reward = next(figure for figure in figures if 'aria-label="Training reward"' in figure)
    assert len(re.findall('<rect class="step"', reward)) == NUM_STEPS


def test_warnings_of_a_run_are_repeated_once(tmp_path: Path) -> None:
    paths = RunPaths(write_run(tmp_path / "run", num_steps=0))
    streams.print_lines("warning: of an earlier run <b>")
    with MetricsLogger([WarningsSink(paths.warnings)]) as log:
        streams.print_lines("no warning: this line", "warning: <b>cut</b>")
        log.log(1, {})
        streams.print_lines("warning: <b>cut</b>")
        log.log(2, {})
    page = write_report(paths.root).html.read_text(encoding="utf-8")
    assert page.count("<li>&lt;b&gt;cut&lt;/b&gt;</li>") == 1
    assert "no warning" not in page


@pytest.mark.parametrize(
    ("score", "expected"), [(0.0, "0.000 ± 0.024"), (1.0, "1.000 ± 0.024"), (0.5, "0.500 ± 0.079")]
)
def test_few_prompts_prove_no_certainty(score: float, expected: str) -> None:
    # By hand: √(1/42 · 41/42 / 40) = 0.0241; √(0.25 / 40) = 0.0791.
    assert str(MeanScore(step=1, score=score, num_prompts=40)) == expected


def test_long_curves_keep_what_stands_out_and_few_points() -> None:
    """Of each three values the first, the least and the largest are drawn, and those that are left at the end."""
    assert _shown(np.array([1.0, 5, 2, 0, 9, 9, 3]), 3).tolist() == [0, 1, 3, 4, 6]


def test_series_of_resumed_runs_with_several_kinds_of_records() -> None:
    """Steps 2 and 3 are repeated; the validation at step 3 is repeated too, that at step 1 stands."""
    rows = [(1, {"x": 1.0}), (1, {"v": 0.1}), (2, {"x": 2.0}), (3, {"x": 3.0, "y": 1.0}), (3, {"v": 0.3})]
    rows += [(2, {"x": 20.0}), (3, {"x": 30.0}), (3, {"v": 0.5})]
    found = build_series(tables_of(MetricsRecord(step=step, time_s=0.0, metrics=metrics) for step, metrics in rows))
    assert found["x"] == Series(steps=(1, 2, 3), values=(1.0, 20.0, 30.0))
    assert found["v"] == Series(steps=(1, 3), values=(0.1, 0.5))
    assert found["y"] == Series(steps=(3,), values=(1.0,))
