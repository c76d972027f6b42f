"""Supervised fine-tuning: what is measured on held-out rows, and lengths in epochs."""

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megarl.config.schema import SftConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.tiny_model import make_byte_tokenizer
from megarl.errors import ConfigError
from megarl.train.supervised import validate_sft
from megarl.train.supervised_inputs import _in_steps
from megarl.train.update import RoleScorer
from megarl.types import FloatArray, Row


class HalvesAndQuarters:
    """Gives the first response token of a row the log-prob ln ½, and every other one ln ¼."""

    def score(self, rows: list[Row], *, step: int) -> dict[str, list[FloatArray]]:
        each = [np.log(np.array([0.5] + [0.25] * (row.num_response_tokens - 1), np.float32)) for row in rows]
        return {"logprobs": each}


def chats(path: Path, answers: list[tuple[str, str]]) -> SftDataset:
    def chat(first: str, second: str) -> dict[str, Any]:
        roles = ("user", "assistant", "user", "assistant")
        contents = ("a", first, "b", second)
        return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]}

    path.write_text("".join(json.dumps(chat(*pair)) + "\n" for pair in answers))
    return SftDataset([path], make_byte_tokenizer(), max_prompt_tokens=50, max_response_tokens=50)


def test_every_trained_token_counts_once(tmp_path: Path) -> None:
    data = chats(tmp_path / "a.jsonl", [("1", "2"), ("333", "4")])
    result = validate_sft(data, cast(RoleScorer, HalvesAndQuarters()), step=3)
    # Trained: 2 + 2 and 4 + 2 tokens with their end tokens; the first of each row has ½, the other 8 have ¼.
    nll = (2 * math.log(2) + 8 * math.log(4)) / 10
    assert result.metrics == pytest.approx(
        {"val/sft/nll": nll, "val/sft/perplexity": math.exp(nll), "val/sft/num_rows": 2, "val/sft/num_tokens": 10}
    )
    assert result.score == pytest.approx(-nll)


def test_epochs_become_whole_steps() -> None:
    settings = _in_steps(SftConfig(batch_size=4, total_epochs=3), 11)
    assert (settings.total_steps, settings.total_epochs) == (6, None)
    assert _in_steps(SftConfig(batch_size=4, total_steps=5), 11).total_steps == 5
    with pytest.raises(ConfigError):
        _in_steps(SftConfig(batch_size=12), 11)
