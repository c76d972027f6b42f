"""The byte tokenizer, whose ids can be worked out by hand."""

from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerBase

from megarl_lab.recipes.tiny_model import make_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_byte_tokenizer()


@pytest.fixture(autouse=True)
def same_template(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Tests give the shared tokenizer other templates; the next test gets its own again."""
    template = tokenizer.chat_template
    yield
    tokenizer.chat_template = template
