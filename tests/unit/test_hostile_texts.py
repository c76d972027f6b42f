"""Ten thousand texts that try to be more than texts, through all that shows or keeps texts of a run."""

import io
import json
import logging
import logging.config
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from megarl.errors import RunError
from megarl.host.exit_codes import exit_on_errors
from megarl.host.stage import logged_stages
from megarl.host.streams import print_lines
from megarl.host.unicode import readable, visible
from megarl.launch import watch
from megarl.launch.status import Heartbeat, print_status
from megarl.migrate.convert_config import Converted, to_run_file
from megarl.record.metrics import JsonlSink, MetricsLogger, RunPaths, read_metrics
from megarl.record.problems import ProblemRecord, append_problems, read_problems
from megarl.record.progress import Progress, ProgressValues, write_line
from megarl.record.rollouts import read_rollouts, write_rollouts
from megarl.record.text_table import align
from megarl.record.timeline import Interval, append_timeline, write_trace
from megarl.record.trackers import OpenedRun, TensorBoardSink, TrackerSink
from megarl.report import write_report
from megarl.report.hint_page import HintedAnswer, HintedExample, HintedToken, HintReport, Table, to_html, to_text
from tests.helpers.hostile_texts import HIDDEN, escaped, hostile_texts
from tests.helpers.recorded_run import evil, write_recorded_run

TEXTS = hostile_texts(10_000)
# What UTF-8 holds: JSON and parquet files take no halves of characters.
MENDED = [readable(text) for text in TEXTS]
BATCHES = [TEXTS[i : i + 100] for i in range(0, len(TEXTS), 100)]
# The colours that megarl itself sets.
OWN_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def test_golden_escapes() -> None:
    assert visible("a\x1b[31m\nb\x9b\u202e\u2028\ud83d\U000e0041") == r"a\x1b[31m\nb\x9b\u202e\u2028\ud83d\U000e0041"
    assert visible("größe 数学 👩\u200d🚀 می\u200cخواهم a\\b") == "größe 数学 👩\u200d🚀 می\u200cخواهم a\\b"
    assert [visible(text) for text in TEXTS] == [escaped(text) for text in TEXTS]
    assert not any(HIDDEN.search(visible(text)) for text in TEXTS)


def test_lines_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(*TEXTS)
    for text in TEXTS[:300]:
        write_line(text)
    expected = [escaped(text) for text in (*TEXTS, *TEXTS[:300])]
    assert capsys.readouterr().out.split("\n") == [*expected, ""]
    with pytest.raises(SystemExit), exit_on_errors():
        raise RunError("".join(TEXTS))
    (error, rest) = capsys.readouterr().err.split("\n")
    assert (error.startswith("error: "), rest) == (True, "")
    assert not HIDDEN.search(error)


def test_lines_of_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_STAGE_FILE", str(tmp_path / "stage"))
    made = logged_stages("megarl.hostile", level="info")["formatters"]["line"]
    config = {"version": 1, "formatters": {"line": made}, "handlers": {}, "disable_existing_loggers": False}
    stream = io.StringIO()
    config["handlers"] = {"h": {"class": "logging.StreamHandler", "formatter": "line", "stream": stream}}
    config["loggers"] = {"megarl.hostile": {"handlers": ["h"], "level": "INFO", "propagate": False}}
    logging.config.dictConfig(config)
    logger = logging.getLogger("megarl.hostile")
    for text in TEXTS:
        logger.info("%s", text)
    lines = stream.getvalue().split("\n")
    assert len(lines) == len(TEXTS) + 1
    assert all(line.endswith(escaped(text)) for line, text in zip(lines, TEXTS, strict=False))
    stream.truncate(0)
    stream.seek(0)
    try:
        raise ValueError("\nERROR forged\x1b[2J")
    except ValueError:
        logger.exception("failed")
    first, *rest = stream.getvalue().rstrip("\n").split("\n")
    assert first.startswith("ERROR ")
    assert all(line.startswith("    ") and not HIDDEN.search(line) for line in rest)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress() -> None:
    for stream in (io.StringIO(), Terminal()):
        for batch in BATCHES[:10]:
            with Progress(total=2, description="".join(batch), stream=stream) as progress:
                progress.note("".join(batch))
                progress.update(1, ProgressValues(loss=1.0))
        # tqdm returns to the start of its line, and goes up from a line below.
        written = stream.getvalue().replace("\x1b[A", "").replace("\r", "").replace("\n", "")
        assert not HIDDEN.search(written)
    assert stream.getvalue().count("\n") <= 3 * 10


def test_tables() -> None:
    lines = align([["name", "value"], *([text, "1"] for text in TEXTS)])
    assert len(lines) == len(TEXTS) + 1
    assert not HIDDEN.search("".join(lines))


def test_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("trainer: {total_steps: 1}\n")
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=50_000, legacy_windows=False
    )
    for batch in BATCHES:
        with pytest.raises(RunError), Heartbeat(tmp_path / "status.json", "train", lambda: None):
            raise RunError("".join(batch))
        print_status(tmp_path, as_json=False)
        lines = capsys.readouterr().out.rstrip("\n").split("\n")
        assert [line.split()[0] for line in lines] == ["state", "command", "driver", "started", "error"]
        # In JSON, two halves of a character that meet become one.
        assert lines[-1] == f"error    {escaped(json.loads(json.dumps(''.join(batch))))}"
        console.print(watch._picture(tmp_path, watch.FollowedMetrics(tmp_path / "metrics.jsonl")))
        screen = console.file.getvalue()  # type: ignore[attr-defined]
        # rich sets the colours of the error, and no links.
        screen_lines = OWN_COLORS.sub("", screen).rstrip().split("\n")
        assert screen_lines[4].rstrip() == lines[-1].rstrip()
        assert not HIDDEN.search("".join(screen_lines))
        console.file.truncate(0)
        console.file.seek(0)


def test_metrics(tmp_path: Path) -> None:
    seen: dict[str, float] = {}
    opened = OpenedRun(log=lambda metrics, step, time_s: seen.update(metrics), finish=lambda outcome: None)
    tracker = TrackerSink("tracker", lambda: opened)
    with MetricsLogger([JsonlSink(tmp_path / "metrics.jsonl"), tracker]) as logger:
        for batch in BATCHES:
            logger.log(1, {f"x/{text}": 0.5 for text in batch})
    (_, *_), lines = read_metrics(tmp_path / "metrics.jsonl"), (tmp_path / "metrics.jsonl").read_text()
    # A reader that takes U+2028 and U+0085 for ends of lines finds the same lines.
    assert len(lines.splitlines()) == lines.count("\n") == len(BATCHES)
    names = {name for line in lines.splitlines() for name in json.loads(line)["metrics"]}
    assert names == {f"x/{text}" for text in MENDED}
    assert set(seen) == {f"x/{escaped(text)}" for text in MENDED}
    with MetricsLogger([TensorBoardSink(tmp_path / "tensorboard")]) as logger:
        logger.log(1, {f"x/{text}": 0.5 for text in TEXTS[:500]})


def problem(texts: list[str]) -> ProblemRecord:
    names = ("judge", "outcome", "reason", "output", "data_source", "uid", "prompt", "response", "ground_truth")
    return ProblemRecord(step=1, phase="train", sample_index=0, **dict(zip(names, texts, strict=False)))


def test_records(tmp_path: Path) -> None:
    append_problems(tmp_path / "p.jsonl", [problem(TEXTS[i : i + 9]) for i in range(0, 9990, 9)])
    assert read_problems(tmp_path / "p.jsonl") == [problem(MENDED[i : i + 9]) for i in range(0, 9990, 9)]
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 1110
    rows = [replace(evil(1), uid=a, prompt=b, response=c, ground_truth=d) for a, b, c, d in fours(MENDED)]
    write_rollouts(tmp_path / "r.parquet", rows)
    assert list(read_rollouts(tmp_path / "r.parquet")) == rows


def fours(texts: list[str]) -> list[list[str]]:
    return [texts[i : i + 4] for i in range(0, len(texts), 4)]


class Page(HTMLParser):
    """A page's policy, its elements with their attributes, and the texts of its `code`.

    Marks of special tokens in texts are no elements. Of figures, whose paths differ, the names of elements count.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Any] = []
        self.drawn: set[str] = set()
        self.cells: list[str] = []
        self.policy = ""
        self._in_figure = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""
        self._in_figure |= tag == "svg"
        if self._in_figure:
            self.drawn.add(tag)
        elif (tag, attrs) != ("span", [("class", "token")]):
            # Titles are made of texts.
            self.elements.append((tag, [name if name == "title" else (name, value) for name, value in attrs]))
        if tag == "code":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._in_figure &= tag != "svg"
        if tag == "code":
            self.cells.append("")


def write_hostile_run(root: Path, texts: list[str], names: list[str]) -> RunPaths:
    """A run whose texts are these in all that its report reads. names: of data sources, judges and settings."""
    paths = write_recorded_run(root, steps=1, prompts=1)
    paths.config.write_text(yaml.safe_dump({"algo": {"name": names[0]}, "rewards": {"sources": {n: n for n in names}}}))
    paths.versions.write_text(json.dumps({name: name for name in names}))
    with MetricsLogger([JsonlSink(paths.metrics)], clock=lambda: 0.0) as log:
        log.log(1, {f"x/{text}": 0.5 for text in texts})
        for step in (0, 1):
            scores = {f"val/test_score/{name}": 0.5 for name in names[:4]}
            log.log(step, {**scores, f"timing_s/{names[4]}": 1.0, f"reward/{names[5]}/unread_frac": 0.5})
    append_problems(paths.problems, [replace(problem(texts[:9]), judge=names[0], outcome=names[1])])
    intervals = [("steps", "step"), ("trainer", names[6])]
    append_timeline(paths.timeline, [Interval(lane=a, name=b, start_s=0.0, end_s=1.0, step=1) for a, b in intervals])
    write_rollouts(
        paths.rollouts(1),
        [
            replace(evil(1), uid=a, prompt=b, response=c, ground_truth=d, data_source=names[0], tokens=(c, d, a))
            for a, b, c, d in fours(texts)
        ],
    )
    return paths


@pytest.mark.filterwarnings("ignore:Glyph")
def test_reports_and_their_browser(tmp_path: Path) -> None:
    """The page has exactly the elements of one with harmless texts, and every text is there to be read."""
    calm = [f"text {i}" for i in range(len(MENDED))]
    paths = write_hostile_run(tmp_path / "a\x1b[31m\n\u202e<b>[link=x]" / "run", MENDED, MENDED[:8])
    other = write_hostile_run(tmp_path / "calm" / "run", calm, calm[:8])
    for each in (paths, other):
        write_report(each.root)
    text = paths.report_html.read_text(encoding="utf-8")
    page, like = Page(text), Page(other.report_html.read_text(encoding="utf-8"))
    assert (page.elements, page.drawn) == (like.elements, like.drawn)
    expected = {escaped(f"x/{escaped(text)}", kept="\n\t", pictures=True) for text in MENDED}
    assert expected <= set(page.cells)
    assert not HIDDEN.search(text.replace("\n", "").replace("\t", ""))
    assert page.policy.startswith("default-src 'none'; style-src-elem 'sha256-")
    receive = re.compile(r'rollouts\.receive\("[0-9a-f]+","\w+",("(?:[^"\\\n]|\\.)*")\)\n')
    read = {path.stem: receive.fullmatch(path.read_text("ascii")) for path in paths.report_files.glob("*_0*.js")}
    assert len(read) == 2
    pieces = [
        json.loads(json.loads(found[1])) for name, found in sorted(read.items()) if found and name.startswith("texts")
    ]
    samples = [(p["prompts"][s["prompt"]], s["response"], s["truth"]) for p in pieces for s in p["samples"]]
    assert samples == [(b, c, d) for _, b, c, d in fours(MENDED)]
    write_trace(paths.timeline, tmp_path / "trace.json")
    assert not HIDDEN.search(json.loads((tmp_path / "trace.json").read_text())["traceEvents"][-1]["name"])


def hint_report(texts: list[str]) -> HintReport:
    examples = tuple(HintedExample(title=a, before=b, hint=c, after=d) for a, b, c, d in fours(texts[:4000]))
    tokens = tuple(HintedToken(text=text, old=-1.0, hinted=-0.5, shuffled=None) for text in texts[4000:9000])
    answer = HintedAnswer(title=texts[9000], question=texts[9001], is_right=True, tokens=tokens)
    table = Table(title=texts[9002], note=texts[9003], rows=tuple((a, b) for a, b, *_ in fours(texts[9004:])))
    return HintReport(title=texts[0], details=texts[1], tables=(table,), examples=examples, answers=(answer,))


def test_pages_and_screens_of_hints() -> None:
    hostile, calm = hint_report(TEXTS), hint_report([f"text {i}" for i in range(len(TEXTS))])
    text = to_html(hostile)
    page = Page(text)
    assert page.elements == Page(to_html(calm)).elements
    assert not HIDDEN.search(text.replace("\n", "").replace("\t", ""))
    assert "default-src 'none'" in page.policy
    for with_colors, own in ((True, OWN_COLORS), (False, re.compile("(?!)"))):
        screen = own.sub("", to_text(hostile, with_colors=with_colors))
        assert not HIDDEN.search(screen.replace("\n", "").replace("\t", ""))


def test_comments_of_converted_run_files() -> None:
    texts = {text: text for text in TEXTS}
    converted = Converted(framework="verl", lost=texts, settings={"run.seed": 3}, assumed=TEXTS[:10])
    text = to_run_file(converted, "\nrun: {name: forged}")
    lines = text.split("\n")
    # Two lines at the head, two titles, and what could not be carried over.
    assert sum(line.startswith("#") for line in lines) == 2 + 2 + len(TEXTS) + 10
    assert yaml.safe_load(text) == {"run": {"seed": 3}}
