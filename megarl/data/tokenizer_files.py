"""Read the files of a tokenizer, and say which of them is damaged."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, TemplateSyntaxError, meta

from megarl.errors import ConfigError
from megarl.host.reading import MODEL_REMEDY, read_object, reading, reason_of, require_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names that templates get from whoever renders a chat, so that data.chat_template cannot decide them.
_GIVEN = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now"})
# A tag of transformers' own, which plain Jinja does not know. It marks the assistant's text and writes nothing.
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def require_tokenizer(path: str | Path, key: str) -> None:
    """Raise ConfigError for a model directory without a tokenizer, and for files in it that cannot be read; the
    engine's generation_config.json, which lies beside, is among them.
    """
    directory, generation = Path(path), Path(path) / "generation_config.json"
    if os.path.lexists(generation):
        read_object(generation, remedy=MODEL_REMEDY, error=ConfigError)
    if not os.path.lexists(directory / "tokenizer_config.json"):
        raise ConfigError(f"{key}: {path} has no tokenizer_config.json; expected a model directory")
    for file in directory.glob("*.json"):
        require_file(file, "JSON", remedy=MODEL_REMEDY, error=ConfigError)


def read_tokenizer(path: str | Path, key: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model directory; ConfigError names the file that is damaged, or else `key`, the setting
    that named the directory.
    """
    require_tokenizer(directory := Path(path), key)
    from transformers import AutoTokenizer  # takes a second of each process that never reads one

    try:
        # By default, transformers asks the terminal whether to run code that the directory brings.
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    # The errors of tokenizers are of class Exception itself, and damaged files may cause any of Python's.
    except Exception as error:
        # transformers rarely names the file.
        for file in sorted(directory.glob("*.json")):
            read_object(file, remedy=MODEL_REMEDY, error=ConfigError)
        for file in sorted(directory.rglob("*.jinja")):
            with reading(file, "text in UTF-8", remedy=MODEL_REMEDY, error=ConfigError):
                file.read_text(encoding="utf-8")
        reason = reason_of(error)
        raise ConfigError(f"{key}: the tokenizer in {path} does not load: {reason}; {MODEL_REMEDY}") from error


def check_copies(directory: Path) -> None:
    """Raise ConfigError if files of a tokenizer's directory have different chat templates of one name, or eos tokens:
    which of them a program reads depends on the program and its version.
    """
    file, others = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    config = read_object(file, remedy=MODEL_REMEDY, error=ConfigError)
    found: dict[str, tuple[Path, str]] = {}
    for path in (file, directory / "chat_template.json", directory / "processor_config.json"):
        inside = read_object(path, remedy=MODEL_REMEDY, error=ConfigError) if path.is_file() else {}
        own = inside.get("chat_template")
        for each in own if isinstance(own, list) else [{"name": "default", "template": own}]:
            _compare_copies(found, str(each["name"]), path, each["template"])
    for path in (directory / "chat_template.jinja", *directory.glob("additional_chat_templates/*.jinja")):
        if path.is_file():
            name = "default" if path.parent == directory else path.stem
            _compare_copies(found, name, path, path.read_text(encoding="utf-8"))
    special = read_object(others, remedy=MODEL_REMEDY, error=ConfigError) if others.is_file() else {}
    ends = [end.get("content") if isinstance(end := each.get("eos_token"), dict) else end for each in (config, special)]
    if None not in ends and ends[0] != ends[1]:
        raise ConfigError(
            f"{file}: eos_token: got {ends[0]!r}, but {others.name} says {ends[1]!r}, and programs read different "
            "ones; correct the one that is wrong"
        )


def _compare_copies(found: dict[str, tuple[Path, str]], name: str, path: Path, template: object) -> None:
    """Note a template, if it is one; ConfigError if another file has a different one of its name."""
    if not isinstance(template, str):
        return
    other, known = found.setdefault(name, (path, template))
    # By lines: Jinja writes line feeds alone, and none for one at the end.
    if known.splitlines() != template.splitlines():
        raise ConfigError(
            f"{other}: its chat template differs from that in {path.relative_to(other.parent)}, and programs read "
            "different ones; remove the one that the model was not trained with"
        )


def parse_template(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> tuple[str, frozenset[str]]:
    """Return the template that renders chats, and the variables that it reads; ConfigError for invalid Jinja."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    own = directory / "chat_template.jinja"
    file = own if own.is_file() else directory / "tokenizer_config.json"
    try:
        template: str = tokenizer.get_chat_template()
        plain = _GENERATION_TAG.sub("", template)
        # Compiling finds filters that there are not, too.
        environment.compile(plain)
        read = meta.find_undeclared_variables(environment.parse(plain))
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"{file}: line {error.lineno} of the chat template is not valid Jinja: {error.message}; correct it, or "
            f"{MODEL_REMEDY}"
        ) from error
    # None of several templates is the default.
    except ValueError as error:
        raise ConfigError(f"{file}: no chat template can be chosen: {reason_of(error)}; {MODEL_REMEDY}") from error
    return template, frozenset(read - _GIVEN - environment.globals.keys())
