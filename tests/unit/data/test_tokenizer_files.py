"""The files of a tokenizer are data."""

import json
import shutil
from pathlib import Path

import pytest

from megarl.data.chat import load_tokenizer
from megarl.data.tokenizer_files import read_tokenizer
from megarl.errors import ConfigError
from megarl_lab.recipes.tiny_model import make_byte_tokenizer


def test_a_tokenizer_that_brings_code_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, transformers asks the terminal."""
    model, mark = tmp_path / "model", tmp_path / "mark"
    make_byte_tokenizer().save_pretrained(model)
    (model / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Tokenizer: pass\n")
    file = model / "tokenizer_config.json"
    named = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Tokenizer"}}))
    monkeypatch.setattr("builtins.input", lambda _: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ConfigError, match="contains custom code"):
        read_tokenizer(model, "model.path")
    assert not mark.exists()
    shutil.rmtree(tmp_path / "modules", ignore_errors=True)


TEMPLATE = make_byte_tokenizer().get_chat_template()
OTHER = TEMPLATE.replace("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize(
    ("config", "files", "differing"),
    [
        ({"chat_template": f"{TEMPLATE}\r\n"}, {}, None),
        ({"chat_template": OTHER}, {}, "chat_template.jinja"),
        ({"chat_template": [{"name": "default", "template": OTHER}]}, {}, "chat_template.jinja"),
        ({"chat_template": [{"name": "tool_use", "template": OTHER}]}, {}, None),
        ({"chat_template": [{"name": "tool_use", "template": OTHER}]},
         {"additional_chat_templates/tool_use.jinja": TEMPLATE}, "additional_chat_templates/tool_use.jinja"),
        ({}, {"chat_template.json": json.dumps({"chat_template": OTHER})}, "chat_template.json"),
        ({}, {"chat_template.json": json.dumps({"chat_template": TEMPLATE})}, None),
        ({}, {"processor_config.json": json.dumps({"chat_template": OTHER})}, "processor_config.json"),
        ({}, {"processor_config.json": json.dumps({"processor_class": "P"})}, None),
        ({}, {"special_tokens_map.json": '{"eos_token": {"content": "<|im_end|>"}}'}, None),
        ({"eos_token": None}, {"special_tokens_map.json": '{"eos_token": "<|im_end|>"}'}, None),
        ({}, {"special_tokens_map.json": '{"eos_token": "<|endoftext|>"}'}, "special_tokens_map.json"),
    ],
)  # fmt: skip
def test_copies_of_templates_and_end_tokens_must_be_equal(
    config: dict[str, object], files: dict[str, str], differing: str | None, tmp_path: Path
) -> None:
    make_byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if differing is None:
        load_tokenizer(tmp_path)
    else:
        with pytest.raises(ConfigError, match=rf"{differing}.*programs read different ones"):
            load_tokenizer(tmp_path)
