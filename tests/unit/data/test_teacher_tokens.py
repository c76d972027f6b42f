"""The tokens of a teacher beside the policy's: the same, with others at the end, learned otherwise, or other ends."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.data.answers import Answers
from megarl.data.chat import load_tokenizer
from megarl.data.stop_tokens import declared_stop_tokens
from megarl.data.teacher_tokens import TeacherTokens, compare_tokens
from megarl.errors import ConfigError
from megarl_lab.recipes.tiny_model import make_byte_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """(name, what to change of the tokenizer, and of its saved files) → a directory with a tokenizer."""

    def make(name: str, *added: str, eos: int | None = None, template: str | None = None) -> Path:
        path, tokenizer = tmp_path / name, make_byte_tokenizer()
        tokenizer.add_tokens(list(added), special_tokens=True)
        if template is not None:
            tokenizer.chat_template = template
        tokenizer.save_pretrained(path)
        ends = tokenizer.eos_token_id if eos is None else eos
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return path

    return make


def compared(policy: Path, teacher: Path) -> TeacherTokens:
    tokenizer = load_tokenizer(policy)
    answers = Answers(tokenizer, declared=declared_stop_tokens(policy))
    return compare_tokens(tokenizer, answers, str(teacher), "teacher.model_path")


def test_the_same_tokens_are_shared_whole(model: Callable[..., Path]) -> None:
    assert compared(model("a"), model("b")) == TeacherTokens(common=None)


def test_added_tokens_at_the_end_are_left_out_and_named(model: Callable[..., Path]) -> None:
    size = len(make_byte_tokenizer())
    found = compared(model("a", "<|x|>"), model("b", "<|y|>"))
    assert found.common == size
    assert found.warnings == (
        f"teacher.model_path: 2 added tokens, such as '<|x|>', are not those of model.path; divergences are over the "
        f"{size} tokens that both have",
    )


def test_another_template_is_a_warning(model: Callable[..., Path]) -> None:
    template = make_byte_tokenizer().chat_template
    assert isinstance(template, str)
    other = model("b", template=template.replace("role'] }}\n", "role'] }}:"))
    (warning,) = compared(model("a"), other).warnings
    assert "is not that of model.path" in warning


def test_learned_tokens_that_differ_are_refused(model: Callable[..., Path]) -> None:
    other = model("b")
    words = json.loads((other / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    first, second = (token for token, id in vocab.items() if id in (40, 41))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=r"differs from that of model\.path in 2 learned tokens, such as .*; use a"):
        compared(model("a"), other)
