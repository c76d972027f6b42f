"""Supervised fine-tuning: what is measured on held-out rows, and lengths in epochs."""

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megarl.config.schema import SftConfig, TrainRewardConfig
from megarl.data.demonstrations import SftDataset
from megarl.data.sampler import PromptSampler
from megarl.errors import ConfigError
from megarl.train.passes import RolePasses
from megarl.train.supervised import pair_metrics, validate_sft
from megarl.train.supervised_inputs import in_steps
from megarl.types import FloatArray, Row
from megarl_lab.recipes.tiny_model import make_byte_tokenizer


class HalvesAndQuarters:
    """Gives the first response token of a row the log-prob ln ½, and every other one ln ¼."""

    def forward(self, rows: list[Row], *, step: int) -> dict[str, list[FloatArray]]:
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
    result = validate_sft(data, cast(RolePasses, HalvesAndQuarters()), step=3)
    # Trained: 2 + 2 and 4 + 2 tokens with their end tokens; the first of each row has ½, the other 8 have ¼.
    nll = (2 * math.log(2) + 8 * math.log(4)) / 10
    assert result.metrics == pytest.approx(
        {"val/sft/nll": nll, "val/sft/perplexity": math.exp(nll), "val/sft/num_rows": 2, "val/sft/num_tokens": 10}
    )
    assert result.score == pytest.approx(-nll)


def test_epochs_become_steps_and_only_the_last_epoch_loses_rows() -> None:
    settings, notes = in_steps(SftConfig(batch_size=4, total_epochs=3), 11, "sft")
    assert (settings.total_steps, settings.total_epochs) == (8, None)
    assert notes == ("3 epochs of 11 examples are 8 steps of 4; the last 1 of the last epoch are left out",)
    # These are the rows that the trainer's sampler gives: each epoch another order of all rows.
    sampler = PromptSampler(11, 4, seed=0)
    drawn = [i for _ in range(settings.total_steps) for i in sampler.next_batch()]
    epochs = [drawn[start : start + 11] for start in (0, 11, 22)]
    assert [sorted(epoch) for epoch in epochs[:2]] == [list(range(11))] * 2
    assert len(set(epochs[2])) == len(epochs[2]) == 10
    assert epochs[0] != epochs[1]
    assert in_steps(TrainRewardConfig(batch_size=4, total_epochs=2), 8, "train_reward")[1] == (
        "2 epochs of 8 examples are 4 steps of 4",
    )


def test_a_length_in_steps_is_left_alone() -> None:
    assert in_steps(SftConfig(batch_size=4, total_steps=5), 11, "sft")[0].total_steps == 5
    with pytest.raises(ConfigError, match=r"^sft\.batch_size: got 12, expected 1 to 11"):
        in_steps(SftConfig(batch_size=12), 11, "sft")


def test_measures_of_held_out_pairs() -> None:
    # Differences 1, 0, −1, of which one is in order; with margins 1, 0, −1 every likelihood is ½.
    numbers = (np.asarray(values, np.float32) for values in ([1, 2, 3], [0, 2, 4], [1, 0, -1]))
    assert pair_metrics(*numbers) == pytest.approx({"accuracy": 1 / 3, "margin": 0.0, "loss": math.log(2)})


def test_large_differences_of_held_out_pairs_stay_finite() -> None:
    chosen, rejected, margins = (np.asarray([value], np.float32) for value in (-2000, 2000, 0))
    assert pair_metrics(chosen, rejected, margins)["loss"] == 4000
