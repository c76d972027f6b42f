"""The byte tokenizer, as in the tests of data."""

from tests.unit.data.conftest import same_template, tokenizer

__all__ = ["same_template", "tokenizer"]
