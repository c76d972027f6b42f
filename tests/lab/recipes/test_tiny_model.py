"""The tiny model directory: what others load from it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megarl.errors import ConfigError
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_byte_tokenizer, make_tiny_model

TOOL = Path(__file__).parents[3] / "tools" / "make_tiny_model.py"
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "ffn_size": 24,
}
TOKENIZER = make_byte_tokenizer()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    assert make_tiny_model(path, TinyModelConfig(), seed=0) == 624_704
    return path


def test_number_of_parameters_by_hand() -> None:
    embedding = 264 * 128
    attention = 128 * (4 * 32) + 2 * 128 * (2 * 32) + (4 * 32) * 128 + 2 * 32  # q, k and v, o, q and k norms
    ffn = 3 * 128 * 384
    assert embedding + 3 * (attention + ffn + 2 * 128) + 128 == 624_704


def test_loads_offline_with_the_auto_classes(model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size == 264
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    text = "<|im_start|>user\nHint: 3+4=7 é 漢 <answer>3 , 4</answer><|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == TOKENIZER(text)["input_ids"]
    # In order: 2 tokens and a line feed, the hint word, "3+4=7 ", é, a space, 漢, a space, the answer, the end.
    assert len(ids) == 3 + 1 + 6 + 2 + 1 + 3 + 1 + (1 + 5 + 1) + 2
    assert tokenizer.decode(ids) == text
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), 264)
    assert bool(torch.isfinite(logits).all())


def test_files(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    assert "lm_head.weight" not in load_file(model_dir / "model.safetensors")


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_others_may_read_what_the_umask_lets_them(mask: int, tmp_path: Path) -> None:
    previous = os.umask(mask)
    try:
        make_tiny_model(tmp_path / "model", TinyModelConfig(hidden_size=8, num_layers=1, ffn_size=8), seed=0)
        assert os.umask(mask) == mask
    finally:
        os.umask(previous)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()} == {0o666 & ~mask}


def test_answers_before_the_last_question_lose_their_thoughts() -> None:
    turns = ["1+2", "<think>3</think>3", "+4", "<think>7</think>7", "a result"]
    roles = ["user", "assistant", "user", "assistant", "tool"]
    chat = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    rendered = TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    read = ["1+2", "3", "+4", "<think>7</think>7", "a result"]
    written = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, read, strict=True)]
    assert rendered == "".join(written) + "<|im_start|>assistant\n"


@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert all(0 <= i < 264 for i in ids)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


@given(st.text(alphabet=st.characters(codec="ascii", exclude_characters="<uaH")))
def test_every_byte_is_a_token(text: str) -> None:
    assert len(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == len(text)


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, TinyModelConfig(**SMALL), seed=seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers: got 0, expected >= 1"),
        ({"num_kv_heads": 3}, "num_kv_heads: got 3, expected a divisor of num_heads=4"),
        ({"head_dim": 7}, "head_dim: got 7, expected an even number"),
        ({"dtype": "int8"}, "dtype: got 'int8', expected float32 or bfloat16"),
    ],
)
def test_bad_sizes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TinyModelConfig(**change)


def test_command(tmp_path: Path) -> None:
    sizes = [arg for name, value in SMALL.items() for arg in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run(
        [sys.executable, str(TOOL), "--out", str(tmp_path), "--untied", "--dtype", "bfloat16", *sizes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["lm_head.weight"].shape == (264, 16)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert f"{sum(tensor.numel() for tensor in weights.values())} parameters" in done.stdout
