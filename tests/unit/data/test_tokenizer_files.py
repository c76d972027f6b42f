"""The files of a tokenizer are data."""

import json
import shutil
from pathlib import Path

import pytest

from megarl.data.tokenizer_files import read_tokenizer
from megarl.errors import ConfigError
from megarl.recipes.tiny_model import make_byte_tokenizer


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
