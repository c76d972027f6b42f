"""Rows read with and without hints by a Hugging Face model, against passes over one row at a time."""

import math

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from megarl.config.algo import HintConfig
from megarl.data.chat import encode_chats
from megarl.data.hints import HintPlacer, donors, hinted_rows
from megarl.data.records import Message
from megarl.run.evaluation.hint_signal import hint_inputs, mutual_information
from megarl.types import Prompt, Row
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_byte_tokenizer, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, TinyModelConfig(hidden_size=32, num_layers=2, ffn_size=48), seed=0)
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


TOKENIZER = make_byte_tokenizer()
PROMPTS = {
    uid: Prompt(
        uid=uid,
        token_ids=tuple(encode_chats(TOKENIZER, [(Message(role="user", content=f"{uid}?"),)])[0]),
        data_source="q",
        ground_truth="",
        extra_info={"gold_solution": hint},
        messages=(Message(role="user", content=f"{uid}?"),),
    )
    for uid, hint in (("a", "It is 2."), ("long question", "Six."), ("none", ""))
}
PLACER = HintPlacer(TOKENIZER, HintConfig(), max_prompt_tokens=99)
ROWS = [
    Row(
        uid=uid,
        sample_index=i,
        token_ids=np.array([*PROMPTS[uid].token_ids, *TOKENIZER(text)["input_ids"]]),
        num_prompt_tokens=len(PROMPTS[uid].token_ids),
        loss_mask=np.ones(len(text), dtype=np.bool_),
    )
    for i, (uid, text) in enumerate([("a", "1+1=2"), ("none", "0"), ("long question", "6 or 7"), ("a", "3"), ("a", "")])
]


def alone(model: torch.nn.Module, row: Row, temperature: float) -> Tensor:
    """The log-probs of all tokens at each place of the response, of a pass over this row only."""
    with torch.no_grad():
        logits = model(torch.from_numpy(row.token_ids)[None]).logits[0, row.num_prompt_tokens - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


@pytest.mark.parametrize(("micro_batch_tokens", "temperature"), [(4096, 1.0), (60, 0.5), (1, 1.0)])
def test_quantities_are_those_of_single_passes(
    model: torch.nn.Module, micro_batch_tokens: int, temperature: float
) -> None:
    own = PLACER.place_all(PROMPTS)
    hinted, shuffled = hinted_rows(ROWS, own), hinted_rows(ROWS, PLACER.place_all(PROMPTS, donors(own, seed=0)))
    got = hint_inputs(
        model,
        ROWS,
        hinted,
        shuffled,
        correct=[True, False, True, False, False],
        temperature=temperature,
        micro_batch_tokens=micro_batch_tokens,
    )
    assert got.correct.tolist() == [True, False, True, False, False]
    assert got.vocab_size == len(TOKENIZER)
    assert got.loss_mask.sum(dim=-1).tolist() == [5, 1, 6, 1, 0]
    for i, row in enumerate(ROWS):
        n, labels = row.num_response_tokens, torch.from_numpy(row.token_ids[row.num_prompt_tokens :])
        plain, with_own, with_other = (
            alone(model, rows[i], temperature) for rows in (ROWS, hinted.rows, shuffled.rows)
        )
        expected = {
            "old_logprobs": plain.gather(-1, labels[:, None])[:, 0],
            "hint_logprobs": with_own.gather(-1, labels[:, None])[:, 0],
            "shuffled_hint_logprobs": with_other.gather(-1, labels[:, None])[:, 0],
            "entropy": -(plain.exp() * plain).sum(dim=-1),
            "hint_kl": torch.nn.functional.kl_div(plain, with_own, log_target=True, reduction="none").sum(dim=-1),
        }
        for name, values in expected.items():
            found = getattr(got, name)[i]
            assert torch.allclose(found[:n].double(), values, atol=2e-5), (name, row.label)
            assert not found[n:].any()
    # A row without a hint says exactly what the plain one says.
    assert torch.equal(got.hint_logprobs[1], got.old_logprobs[1])  # type: ignore[index]
    assert got.hint_logprobs is not None
    assert not torch.equal(got.hint_logprobs[0], got.shuffled_hint_logprobs[0])  # type: ignore[index]


def test_information_by_every_estimator(model: torch.nn.Module) -> None:
    got = hint_inputs(model, ROWS, hinted_rows(ROWS, PLACER.place_all(PROMPTS)), correct=[True] * 5)
    assert got.shuffled_hint_logprobs is None
    old, hint = (quantities[0, 0].item() for quantities in (got.need("old_logprobs"), got.need("hint_logprobs")))
    d = hint - old
    expected = {"p_weighted": math.exp(hint) * d, "pmi": d, "kl_is": math.exp(d) * d}
    for name, value in expected.items():
        assert mutual_information(got, name)[0, 0].item() == pytest.approx(value, abs=1e-6)
    assert torch.equal(mutual_information(got, "full_kl"), got.need("hint_kl"))
