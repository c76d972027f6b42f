"""Demonstrations of prompts; the byte tokenizer has one token per character (see test_chat.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.algo import DemonstrationConfig
from megarl.data.prompts import PromptDataset
from megarl.data.records import write_parquet
from megarl.data.tiny_model import make_byte_tokenizer
from megarl.errors import DataError

EOS = 2


def row(question: str, answer: str | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "data_source": "megarl/sums",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "target": None if answer is None else [{"role": "assistant", "content": answer}],
        **changes,
    }


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(character) - 30 for character in text)


@pytest.fixture
def open_data(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Any:
    def open_rows(*rows: dict[str, Any], **cfg: Any) -> PromptDataset:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        demonstrations = DemonstrationConfig(strategy="random", **cfg)
        return PromptDataset([path], tokenizer, max_prompt_tokens=20, demonstrations=demonstrations)

    return open_rows


def test_a_demonstration_ends_in_eos_and_may_be_missing(open_data: Any) -> None:
    data = open_data(row("1+1", "22"), row("2"), row("3", "4", target=[]), row("4", "5<|im_end|>"))
    assert [data[i].demonstration_ids for i in range(4)] == [(*ids("22"), EOS), (), (), (*ids("5"), EOS)]
    assert [data[i].demonstration_probs for i in range(4)] == [()] * 4


def test_long_demonstrations_are_cut_without_eos_or_dropped(open_data: Any) -> None:
    rows = [row("1", "123"), row("2", "1234")]
    cut = open_data(*rows, max_tokens=3)
    assert [cut[i].demonstration_ids for i in range(2)] == [(*ids("123"), EOS), ids("123")]
    dropped = open_data(*rows, max_tokens=3, on_long="drop")
    assert [dropped[i].demonstration_ids for i in range(2)] == [(*ids("123"), EOS), ()]


def test_a_dropped_prompt_takes_its_demonstration_along(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [row("1", "2"), row("x" * 30, "3"), row("4", "5")])
    data = PromptDataset(
        [path],
        tokenizer,
        max_prompt_tokens=20,
        on_long_prompt="drop",
        demonstrations=DemonstrationConfig(strategy="random"),
    )
    assert [(data[i].uid, data[i].demonstration_ids) for i in range(2)] == [
        ("megarl/sums:0", (*ids("2"), EOS)),
        ("megarl/sums:2", (*ids("5"), EOS)),
    ]


def test_a_think_tag_that_the_prompt_opens_is_not_repeated(tmp_path: Path) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    path = tmp_path / "a.parquet"
    write_parquet(path, [row("1", "<think>\n2")])
    data = PromptDataset([path], tokenizer, max_prompt_tokens=50, demonstrations=DemonstrationConfig(strategy="random"))
    assert data[0].demonstration_ids == (*ids("2"), EOS)


def test_without_demonstrations_targets_are_not_read(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row("1", target_probs="never looked at")) + "\n")
    assert PromptDataset([path], tokenizer, max_prompt_tokens=20)[0].demonstration_ids == ()


def test_probabilities_follow_their_tokens(open_data: Any) -> None:
    data = open_data(
        row("1", "22", target_probs=[0.5, 1]),
        row("2", "22", target_probs=[0.5, -1, 0.25]),
        row("3", "1234", target_probs=[0.1, 0.2, 0.3, 0.4]),
        row("4", "2"),
        max_tokens=3,
    )
    assert [data[i].demonstration_probs for i in range(4)] == [
        (0.5, 1.0, -1.0),
        (0.5, -1.0, 0.25),
        (0.1, 0.2, 0.3),
        (),
    ]


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ([0.5], r"target_probs has 1 entries, expected 2, one per token of the target, or 3 with the end token"),
        ([0.5] * 4, r"target_probs has 4 entries, expected 2"),
        ([0.5, 0.0], r"target_probs\[1\] is 0.0, expected a number in \(0, 1\], or -1 if unknown"),
        ([0.5, "1"], r"target_probs\[1\] is '1', expected a number"),
        ("0.5", "target_probs is str, expected a list of numbers"),
    ],
)
def test_bad_probabilities_stop_at_once(open_data: Any, probs: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl row 1: {message}"):
        open_data(row("1", "2"), row("2", "22", target_probs=probs))


def test_bad_targets_stop_at_once(open_data: Any) -> None:
    two_turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(DataError, match=r"a\.jsonl row 0: target has roles \['user', 'assistant'\]"):
        open_data(row("1", target=two_turns))


def test_a_strategy_needs_demonstrations(open_data: Any) -> None:
    with pytest.raises(DataError, match=r"none of the 1 prompts has a usable target, but algo.demonstrations.strategy"):
        open_data(row("1"))
    with pytest.raises(DataError, match="none of the 1 prompts has a usable target"):
        open_data(row("1", "1234"), max_tokens=3, on_long="drop")
