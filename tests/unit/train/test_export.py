"""The check of what ranks wrote together, and the files beside the weights."""

import json
from pathlib import Path

import pytest

from megarl.data.stop_tokens import declared_stop_tokens
from megarl.errors import WeightSyncError
from megarl.train.export import check_complete, name_end_of_answers
from megarl.weights.companions import copy_companions
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

NUM_ELEMENTS = {"a": 6, "b": 4}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"a": 6}, r"did not write 1 tensors completely .*b \(0/4\)"),
        ({"a": 6, "b": 8}, r"b \(8/4\)"),
        ({"a": 6, "b": 4, "c": 1}, r"c \(1/0\)"),
    ],
    ids=["missing", "twice", "unknown"],
)
def test_check_complete(written: dict[str, int], message: str) -> None:
    check_complete(NUM_ELEMENTS, NUM_ELEMENTS)
    with pytest.raises(WeightSyncError, match=message):
        check_complete(NUM_ELEMENTS, written)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # The byte tokenizer's template ends answers with <|im_end|>, which is token 2; <|endoftext|> is token 0.
        ({"generation_config.json": {"eos_token_id": 0, "top_p": 0.8}}, {"eos_token_id": [2, 0], "top_p": 0.8}),
        ({"generation_config.json": {"eos_token_id": [0, 2]}}, {"eos_token_id": [0, 2]}),
        ({"generation_config.json": {}}, {"eos_token_id": [2]}),
        ({"config.json": {"eos_token_id": 0}}, {"eos_token_id": [2, 0]}),
        ({"config.json": {"eos_token_id": 2}}, None),
    ],
)
def test_an_export_names_the_end_that_was_trained(
    files: dict[str, dict[str, object]], expected: dict[str, object] | None, tmp_path: Path
) -> None:
    make_byte_tokenizer().save_pretrained(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    name_end_of_answers(tmp_path)
    file = tmp_path / "generation_config.json"
    assert (json.loads(file.read_text()) if file.is_file() else None) == expected
    assert 2 in declared_stop_tokens(tmp_path)


def test_all_that_a_model_needs_goes_along(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "export"
    along = (
        *("config.json", "chat_template.jinja", "merges.txt", "tokenizer.model", "qwen.tiktoken", "modeling_own.py"),
        *("LICENSE", "LICENCE.md", "NOTICE", "USE_POLICY.md", "preprocessor_config.json"),
        "additional_chat_templates/tool_use.jinja",
    )
    left = ("model.safetensors", "model.safetensors.index.json", "README.md", "original/params.json")
    for name in (*along, *left):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target.mkdir()
    copy_companions(source, target)
    assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == set(along)
