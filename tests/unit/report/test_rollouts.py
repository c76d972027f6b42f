"""The data of the rollout browser, as its page reads them."""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megarl.record.metrics import RunPaths
from megarl.record.rollouts import RolloutRecord, write_rollouts
from megarl.record.turns import Turn
from megarl.report import rollouts
from megarl.report.rollouts import Verdicts, sample_values, spread, token_values, write_browser
from megarl.vision.store import ImageStore
from tests.helpers.recorded_run import evil, forked, write_recorded_run, write_validation

PLAIN = RolloutRecord(
    step=1,
    uid="sums:7",
    sample_index=2,
    data_source="sums",
    prompt="1+1=?",
    response="2",
    ground_truth="2",
    reward=1.0,
    finish_reason="stop",
    num_prompt_tokens=5,
    num_response_tokens=1,
    correct=True,
    details='{"parse_failed": 0.0}',
)
# A demonstrated token, one of the policy, one that it read, and another of its own.
TALK = replace(
    PLAIN,
    tokens=("a", "b", "c", "d"),
    rollout_logprobs=(None, -1.0, None, -0.5),
    old_logprobs=(-3.0, -1.25, -9.0, -0.375),
    advantage=(0.5, 1.0, 7.0, 1.5),
    hint_gain=(0.25, 0.5, 7.0, -1.5),
    base_advantage=(0.5, 0.5, 0.5, 0.5),
    divergence=(0.125, -0.5, 9.0, 1.25),
    turns=(
        Turn(author="demonstration", text="a", num_tokens=1),
        Turn(author="policy", text="b", num_tokens=1),
        Turn(author="environment", text="c", num_tokens=1),
        Turn(author="policy", text="d", reward=1.0, num_tokens=1),
    ),
    num_calls=3,
)


SCRIPTS = ("pieces.js", "texts.js", "list.js", "tree.js", "sample.js", "rollouts.js")


def read(path: Path) -> tuple[str, str, Any]:
    """A script's version, name and data. Its only statement is a call with texts, the last of JSON."""
    text = path.read_text(encoding="ascii")
    call, end = "rollouts.receive(", ")\n"
    assert (text[: len(call)], text[-len(end) :]) == (call, end)
    version, name, data = json.loads(f"[{text[len(call) : -len(end)]}]")
    return version, name, json.loads(data)


def pieces(folder: Path, kind: str) -> Iterator[Any]:
    yield from (read(path)[2] for path in sorted(folder.glob(f"{kind}_*.js")))


def test_values_of_tokens_and_of_their_sample() -> None:
    tokens = token_values(TALK)
    assert tokens == {
        "text": ("a", "b", "c", "d"),
        "logprob": [None, -1.0, None, -0.5],
        "mismatch": [None, 0.25, None, -0.125],
        "advantage": [0.5, 1.0, 7.0, 1.5],
        "signal": [0.25, 0.5, 7.0, -1.5],
        "base": [0.5] * 4,
        "divergence": [0.125, -0.5, 9.0, 1.25],
    }
    # What was read does not count: (−1 − .5) / 2, (.5 + 1 + 1.5) / 3, (.25 + .5 − 1.5) / 3, (.125 − .5 + 1.25) / 3 and
    # max(.25, .125).
    expected = {"logprob": -0.75, "advantage": 1.0, "signal": -0.25, "divergence": 0.2917, "mismatch": 0.25}
    assert sample_values(TALK, tokens) == expected
    assert token_values(PLAIN) == {}
    assert sample_values(PLAIN, {}) == dict.fromkeys(expected)
    # Rows that were not trained on have neither the trainer's log-probs nor advantages.
    untrained = replace(TALK, old_logprobs=(), advantage=(), hint_gain=(), base_advantage=(), divergence=())
    assert list(token_values(untrained)) == ["text", "logprob"]
    assert token_values(replace(PLAIN, tokens=("2",), rollout_logprobs=(-0.123456,)))["logprob"] == [-0.1235]


def test_the_index_has_a_row_for_every_sample(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    write_rollouts(paths.rollouts(1), [PLAIN, replace(TALK, uid="calc:0", data_source="calc", reward=-0.25)])
    # A file name orders by its digits, a step by its number.
    write_rollouts(paths.rollouts(1_000_000), [replace(PLAIN, step=1_000_000, correct=False, sample_index=0)])
    write_validation(paths, 5, range(7, 8), correct=True)
    verdicts = write_browser([("run", paths)], tmp_path / "out")
    assert [(each.phase, each.step, each.num_right, each.num_samples) for each in verdicts] == [
        ("training", 1, 2, 2),
        ("training", 1_000_000, 0, 1),
        ("validation", 5, 1, 1),
        ("validation, greedy", 5, 1, 1),
    ]
    version, name, index = read(tmp_path / "out" / "index.js")
    assert name == "index"
    columns = index.pop("columns")
    assert index == {
        "runs": ["run"],
        "phases": ["training", "validation", "validation, greedy"],
        "sources": ["sums", "calc"],
        # A uid with another text is another prompt.
        "uids": ["sums:7", "calc:0", "sums:7"],
        "starts": [0],
    }
    assert columns == {
        "run": [0] * 5,
        "phase": [0, 0, 0, 1, 2],
        "step": [1, 1, 1_000_000, 5, 5],
        "source": [0, 1, 0, 0, 0],
        "prompt": [0, 1, 0, 2, 2],
        "sample": [2, 2, 0, 0, 0],
        "right": [1, 1, 0, 1, 1],
        "reward": [1.0, -0.25, 1.0, 1.0, 1.0],
        "length": [1, 1, 1, 6, 6],
        "demonstrated": [0, 1, 0, 0, 0],
        "logprob": [None, -0.75, None, None, None],
        "advantage": [None, 1.0, None, None, None],
        "signal": [None, -0.25, None, None, None],
        "divergence": [None, 0.2917, None, None, None],
        "mismatch": [None, 0.25, None, None, None],
    }
    assert read(tmp_path / "out" / "texts_00000.js")[:2] == (version, "texts_00000")
    (texts,) = pieces(tmp_path / "out", "texts")
    assert texts["prompts"] == ["1+1=?", "7+1=?"]
    assert texts["samples"][:2] == [
        {"prompt": 0, "response": "2", "truth": "2", "finish": "stop", "details": {"parse_failed": 0.0}},
        {
            "prompt": 0,
            "turns": [
                ["demonstration", "a", 0.0, 1],
                ["policy", "b", 0.0, 1],
                ["environment", "c", 0.0, 1],
                ["policy", "d", 1.0, 1],
            ],
            "calls": 3,
            "truth": "2",
            "finish": "stop",
            "details": {"parse_failed": 0.0},
        },
    ]
    assert texts["samples"][3] == {"prompt": 1, "response": "#### 8", "truth": "8", "finish": "stop"}
    (tokens,) = pieces(tmp_path / "out", "tokens")
    assert [each is None for each in tokens] == [True, False, True, True, True]


def test_texts_are_divided_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 + 4·4 and 4 + 4 characters: a piece ends with the sample that brings it to 20."""
    monkeypatch.setattr(rollouts, "PIECE_CHARS", 20)
    paths = RunPaths(tmp_path / "run")
    said = [("prompt", "1111")] * 4 + [("next", "2222")] + [("other", "3")]
    rows = [replace(PLAIN, prompt=prompt, response=response) for prompt, response in said]
    write_rollouts(paths.rollouts(1), rows)
    write_browser([("run", paths)], tmp_path / "out")
    # 6 + 4 + 4 + 4 = 18, with the fourth 22; 8, then 8 + 6 = 14 and the end.
    assert read(tmp_path / "out" / "index.js")[2]["starts"] == [0, 4]
    first, second = pieces(tmp_path / "out", "texts")
    assert (first["prompts"], len(first["samples"])) == (["prompt"], 4)
    assert (second["prompts"], [each["prompt"] for each in second["samples"]]) == (["next", "other"], [0, 1])
    assert [len(piece) for piece in pieces(tmp_path / "out", "tokens")] == [4, 2]


def test_runs_share_prompts_and_the_first_is_counted(tmp_path: Path) -> None:
    first = write_recorded_run(tmp_path / "a", steps=1, prompts=2, samples=2)
    second = write_recorded_run(tmp_path / "b", steps=1, prompts=3, samples=1, seed=1)
    verdicts = write_browser([("a", first), ("b", second)], tmp_path / "out")
    assert verdicts == [Verdicts(phase="training", step=1, num_right=2, num_samples=4)]
    index = read(tmp_path / "out" / "index.js")[2]
    assert index["runs"] == ["a", "b"]
    assert index["uids"] == ["sums:0", "sums:1", "sums:2"]
    assert index["columns"]["run"] == [0, 0, 0, 0, 1, 1, 1]
    assert index["columns"]["prompt"] == [0, 0, 1, 1, 0, 1, 2]


@pytest.mark.parametrize("in_reply", [False, True])
def test_images_of_prompts_and_replies_are_shown_as_small_pictures(tmp_path: Path, in_reply: bool) -> None:
    """One of 300 × 150 pixels, red on the left; another is no longer there."""
    paths, out = RunPaths(tmp_path / "run"), io.BytesIO()
    whole = Image.new("RGB", (300, 150), "blue")
    whole.paste("red", (0, 0, 150, 150))
    whole.save(out, "PNG")
    digest = ImageStore(paths.root / "images").put(out.getvalue())
    prompt = f"look <image {digest}> or <image {'0' * 64}>"
    turns = (Turn(author="policy", text="hm"), Turn(author="environment", text=prompt))
    shown = {"turns": turns, "prompt": "?"} if in_reply else {"prompt": prompt}
    write_rollouts(paths.rollouts(1), [replace(PLAIN, **shown), replace(PLAIN, **shown, uid="b")])
    write_browser([("run", paths)], tmp_path / "out")
    (texts,) = pieces(tmp_path / "out", "texts")
    assert texts["prompts"] == [shown["prompt"]]
    ((kept, url),) = texts["images"].items()
    head, _, coded = url.partition(",")
    picture = Image.open(io.BytesIO(base64.b64decode(coded)))
    assert (kept, head, picture.size) == (digest, "data:image/webp;base64", (128, 64))
    left, right = (picture.convert("RGB").getpixel((x, 32)) for x in (20, 108))
    assert (left[0] > 200 > 60 > left[2], right[2] > 200 > 60 > right[0]) == (True, True)


def test_turns_that_begin_branches_say_where(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    write_rollouts(paths.rollouts(1), [forked(1)])
    write_browser([("run", paths)], tmp_path / "out")
    (texts,) = pieces(tmp_path / "out", "texts")
    assert texts["samples"][0]["turns"] == [
        ["policy", "hm|calc", 0.0, 7],
        ["environment", "calc=1776\n", 0.0, 10, -1, 7],
        ["policy", "#### 1776", 0.0, 9],
        ["environment", "6*7?", 0.0, 4, -1, 0],
        ["policy", "42", 0.0, 2],
        ["environment", "once more", 0.0, 9, 2, 4],
        ["policy", " 1776!", 0.0, 6],
    ]


def test_a_new_browser_replaces_the_old_one(tmp_path: Path) -> None:
    paths = write_recorded_run(tmp_path / "run", steps=1, prompts=1)
    write_browser([("run", paths)], tmp_path / "out")
    version = read(tmp_path / "out" / "index.js")[0]
    (tmp_path / "out" / "texts_00009.js").write_text("of an earlier report")
    write_browser([("run", paths)], tmp_path / "out")
    assert read(tmp_path / "out" / "index.js")[0] != version
    names = {"index.js", "texts_00000.js", "tokens_00000.js", "rollouts.css", "rollouts.html", *SCRIPTS}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    paths.rollouts(1).unlink()
    assert write_browser([("run", paths)], tmp_path / "out") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_no_text_of_a_model_ends_a_script(tmp_path: Path) -> None:
    """Scripts are files of their own, in ASCII; `read` verifies that each is one call with JSON."""
    paths = RunPaths(tmp_path / "run")
    write_rollouts(paths.rollouts(1), [evil(1), replace(PLAIN, response='\u2028\ud7ff"\\')])
    write_browser([("run", paths)], tmp_path / "out")
    (texts,) = pieces(tmp_path / "out", "texts")
    assert [each["response"] for each in texts["samples"]] == [evil(1).response, '\u2028\ud7ff"\\']
    source = "".join((rollouts.BROWSER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in source


def test_of_many_recorded_steps_some_are_shown() -> None:
    files = [Path(f"step_{i}") for i in range(1, 1001)]
    shown = spread(files)
    assert (len(shown), shown[0], shown[-1]) == (256, files[0], files[-1])
    # (1000 − 1) / (256 − 1) = 3.92: neighbours are three or four apart.
    assert {files.index(b) - files.index(a) for a, b in pairwise(shown)} == {3, 4}
    assert spread(files[:256]) == files[:256]
    assert spread(files[:1]) == files[:1]
    assert spread([]) == []
