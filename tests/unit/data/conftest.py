"""The byte tokenizer, whose ids can be worked out by hand."""

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.tiny_model import make_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_byte_tokenizer()
