"""What is said of a damaged file: every reader of a user's or a run's files, with every damage that it can meet."""

import gzip
import json
import os
import pickle
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.load import load_config, read_saved
from megarl.data.files import RowFiles
from megarl.data.tokenizer_files import parse_template, read_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.host.reading import read_object, reading
from megarl.launch.status import AttemptLog, read_status
from megarl.record.metrics import read_metrics
from megarl.record.problems import read_problems
from megarl.record.rollouts import read_answers, read_rollouts
from megarl.record.timeline import read_timeline
from megarl.rewards.custom.signatures import load_function
from megarl.rollout.replay import read_record
from megarl.weights.dist_index import read_index
from megarl.weights.families import read_hf_config
from megarl.weights.safetensors_headers import model_files
from megarl.weights.safetensors_map import read_specs
from megarl_lab.recipes.public_files import write_distinct
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader: the name of the file that it reads in a directory, and how it is called with the file's path."""

    file: str
    read: Callable[[Path], object]


def read_rows(path: Path) -> list[Any]:
    return list(RowFiles([path], columns=("a",)))


def read_template(path: Path) -> None:
    parse_template(read_tokenizer(path.parent, "model.path"), path.parent)


JSON = {
    "config.json": Reader(file="config.json", read=lambda path: read_hf_config(path.parent)),
    "index": Reader(file="model.safetensors.index.json", read=lambda path: model_files(path.parent)),
    "any": Reader(file="versions.json", read=read_object),
    "status": Reader(file="status.json", read=lambda path: read_status(path.parent)),
}
TOKENIZER = {
    name: Reader(file=f"{name}.json", read=read_template)
    for name in ("tokenizer", "tokenizer_config", "generation_config")
}
LINES = {
    "metrics": Reader(file="metrics.jsonl", read=read_metrics),
    "timeline": Reader(file="timeline.jsonl", read=read_timeline),
    "problems": Reader(file="reward_problems.jsonl", read=read_problems),
    "attempts": Reader(file="attempts.jsonl", read=lambda path: AttemptLog(path.parent).read()),
    "rows": Reader(file="rows.jsonl", read=read_rows),
}
PARQUET = {
    "rows": Reader(file="rows.parquet", read=read_rows),
    "distinct": Reader(file="x.parquet", read=lambda path: write_distinct([path], path.with_name("out.parquet"))),
    "rollouts": Reader(file="step_000001.parquet", read=read_rollouts),
    "answers": Reader(file="samples.parquet", read=read_answers),
    "record": Reader(file="step_000001.parquet", read=read_record),
}
OTHERS = {
    "safetensors": Reader(file="model.safetensors", read=read_specs),
    "run file": Reader(file="run.yaml", read=load_config),
    "saved config": Reader(file="config.yaml", read=read_saved),
    "torch_dist": Reader(file=".metadata", read=lambda path: read_index(path.parent)),
    "reward": Reader(file="reward.py", read=lambda path: load_function(path, "compute_score")),
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1234\n"
# Damage that no reader takes for content.
DAMAGE = {
    "zeros": b"\0" * 64,
    "binary": bytes(range(128, 256)),
    "pointer of Git LFS": POINTER,
    "gzip": gzip.compress(b'{"a": 1}\n', mtime=0),
    "cut": b'{"a": [1, "tw',
    "latin-1": b'{"a": "caf\xe9"\n',
    "web page": b"<!DOCTYPE html><html><body>Not found</body></html>",
    "merge conflict": b'<<<<<<< HEAD\n{"a": 1}\n=======\n{"a": 2}\n>>>>>>> other\n',
    "deep": b'{"a": ' + b"[" * 200_000,
}
ALL = {
    f"{kind} {name}": r
    for kind, rs in (("json", JSON), ("tokenizer", TOKENIZER), ("lines", LINES), ("parquet", PARQUET), ("", OTHERS))
    for name, r in rs.items()
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(str(path), TinyModelConfig(), seed=0)
    return path


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Path:
    """A directory with the small files of a whole model, one of which a test replaces."""
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def message(reader: Reader, path: Path) -> str:
    """Read, and return the one line that is said of the file."""
    with pytest.raises((ConfigError, DataError)) as caught:
        reader.read(path)
    text = str(caught.value)
    assert "\n" not in text
    assert path.name in text
    assert len(text) < 600
    return text


def pairs(kinds: Sequence[str]) -> Iterator[Any]:
    """Each reader with two kinds, and each kind with several readers; `long` has the product."""
    for i, reader in enumerate(ALL):
        for j, kind in enumerate(kinds):
            is_quick = (j - 2 * i) % len(kinds) in (0, 4 % len(kinds))
            yield pytest.param(reader, kind, marks=[] if is_quick else [pytest.mark.long])


@pytest.mark.parametrize(("reader", "damage"), pairs(list(DAMAGE)))
def test_damage_is_one_line(place: Path, reader: str, damage: str) -> None:
    path = place / ALL[reader].file
    # A last line without its end is that of a run that was killed; this one has its end.
    path.write_bytes(DAMAGE[damage] + (b"\n" if reader.startswith("lines") else b""))
    text = message(ALL[reader], path)
    if damage == "pointer of Git LFS":
        assert "git lfs pull" in text
    if damage == "gzip":
        assert "is compressed with gzip" in text
    assert re.search(r"; \S+", text), "no remedy"


@pytest.mark.parametrize("reader", [name for name in ALL if not name.startswith("lines")])
def test_an_empty_file(place: Path, reader: str) -> None:
    path = place / ALL[reader].file
    path.write_bytes(b"")
    if reader == " run file":
        ALL[reader].read(path)  # an empty mapping: nothing but defaults
        return
    message(ALL[reader], path)


def directory(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to("moved-away")


NO_FILES = {"directory": directory, "named pipe": pipe, "moved-away": dangling}


@pytest.mark.parametrize(("reader", "said"), pairs(list(NO_FILES)))
def test_what_is_no_file(place: Path, reader: str, said: str) -> None:
    """A pipe is not opened, which would wait for its writer."""
    path = place / ALL[reader].file
    path.unlink(missing_ok=True)
    NO_FILES[said](path)
    assert said in message(ALL[reader], path)


@pytest.mark.parametrize("reader", [name for name in ALL if name.startswith(("json", "tokenizer", "lines"))])
@pytest.mark.parametrize("content", [b"[1, 2]", b'"text"', b"null", b"7"])
def test_json_of_another_type(place: Path, reader: str, content: bytes) -> None:
    path = place / ALL[reader].file
    path.write_bytes(content + b"\n")
    message(ALL[reader], path)


def test_a_byte_order_mark_is_no_damage(place: Path) -> None:
    """Editors on Windows write one."""
    for name, reader in JSON.items():
        path = place / reader.file
        if name == "any":
            path.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}')
            assert reader.read(path) == {"a": 1}
    rows = place / "rows.jsonl"
    rows.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}\n')
    assert read_rows(rows) == [{"a": 1}]
    run = place / "run.yaml"
    run.write_bytes(b"\xef\xbb\xbfrun: {name: x}\n")
    assert load_config(run).run.name == "x"


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": ["model.safetensors"]}])
def test_an_index_without_its_map(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"index\.json: has no weight_map of tensors to files; copy the model"):
        model_files(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        7,
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "two", "data_offsets": [0, 8]},
        {"dtype": [], "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_headers_of_safetensors_that_make_no_sense(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"x": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    message(OTHERS["safetensors"], path)


TEXT = [f"question {i}: what is {i * i}?" for i in range(400)]


def spoiled(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Parquet files with one byte changed at a time, over the whole file."""
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"a": TEXT}), whole, write_page_checksum=True)
    content = whole.read_bytes()
    for at in np.linspace(0, len(content) - 1, 60, dtype=int):
        changed = bytearray(content)
        changed[at] ^= 0xFF
        path = tmp_path / "rows.parquet"
        path.write_bytes(changed)
        yield int(at), path


def test_flipped_bytes_of_parquet(tmp_path: Path) -> None:
    """A file with checksums is either refused, or nothing that is read of it has changed."""
    refused = 0
    for at, path in spoiled(tmp_path):
        said, rows = "", []
        try:
            rows = read_rows(path)
        except DataError as error:
            said = str(error)
            refused += 1
        assert "\n" not in said, at
        assert said.startswith(f"{path}: ") or [row.get("a") for row in rows] in (TEXT, [None] * len(TEXT)), at
    assert refused > 30


def test_text_in_parquet_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    raw = pa.array([b"caf\xe9", b"ok"], pa.binary())
    text = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"a": text}), path)
    with pytest.raises(DataError, match=r"rows\.parquet row 0: a has a text that is not UTF-8"):
        read_rows(path)


def test_a_parquet_file_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": TEXT}), path)
    content = path.read_bytes()
    for kept in (4, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:kept])
        with pytest.raises(DataError, match=r"rows\.parquet: not a Parquet file: .*; copy it again"):
            read_rows(path)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if messages %}\nx", "line 1 of the chat template"),
        ("{{ messages[0 }}", "line 1 of the chat template"),
        ("{{ messages | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("\n\n{% frob %}", "line 3 of the chat template"),
    ],
)
def test_a_chat_template_that_is_not_jinja(place: Path, template: str, said: str) -> None:
    file = place / "chat_template.jinja"
    file.write_text(template)
    text = message(Reader(file=file.name, read=read_template), file)
    assert said in text
    assert text.endswith("; correct it, or copy the model again")
    file.write_bytes(b"{{ '\xe9' }}")
    assert "not text in UTF-8" in message(Reader(file=file.name, read=read_template), file)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_further_files_of_a_tokenizer(place: Path, name: str) -> None:
    """transformers does not read all of them in every version; where it does, the file is named."""
    (place / name).write_bytes(b'{"eos_token": ')
    said = name
    try:
        read_tokenizer(place, "model.path")
    except ConfigError as error:
        said = str(error)
    assert name in said


@pytest.mark.parametrize(
    "text",
    [
        "data: {chat_template: &a {x: *a}}",
        "actor: &r {optimizer: *r}",
        "data: {chat_template: {x0: &a0 [1,2,3,4,5,6,7,8,9]"
        + "".join(f", x{i}: &a{i} [{','.join(9 * [f'*a{i - 1}'])}]" for i in range(1, 10))
        + "}}",
        "a: " + "[" * 100_000,
        "\n".join(f"{' ' * i}a{i}:" for i in range(3000)),
    ],
    ids=["contains itself", "section of itself", "grows ninefold", "brackets", "indented"],
)
def test_yaml_that_has_no_end(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert "not valid YAML: it" in message(OTHERS["run file"], path)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def compute_score(:", r"reward\.py:1: not Python: invalid syntax"),
        ("import no_such_module_here", r"reward\.py:1: ModuleNotFoundError: No module named"),
        ("import sys\n\nsys.exit(3)", r"reward\.py:3: SystemExit: 3"),
        ("def f():\n\treturn 1\n        return 2\n", r"reward\.py:3: not Python: "),
        ("x = 'a\0b'", r"reward\.py:\w+: not Python: .*null bytes"),
    ],
)
def test_a_file_of_rewards_that_does_not_load(tmp_path: Path, code: str, said: str) -> None:
    path = tmp_path / "reward.py"
    path.write_text(code)
    assert re.search(said, message(OTHERS["reward"], path))


def test_metadata_of_a_checkpoint_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps({"a": 1}))
    assert "not the metadata of a torch_dist checkpoint" in message(OTHERS["torch_dist"], path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    # Root may read everything.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"config\.json: this user may not read it; chmod u\+r"):
        read_hf_config(tmp_path)


def test_errors_of_megarl_pass(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("x")
    with pytest.raises(ConfigError, match=r"^as it is$"), reading(path, "anything"):
        raise ConfigError("as it is")
