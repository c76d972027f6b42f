"""The files that a run computes from: what is among them, and what a change of each does to a resume."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from megarl.config import Config, from_dict
from megarl.errors import ConfigError
from megarl.record import inputs
from megarl.record.checkpoints import Command, RunState, checkpoint_dir, mark_complete
from megarl.record.inputs import FILES, FREE, RunInputs, _is_in, texts_of
from megarl.run.resume import find_checkpoint, resume_notes
from megarl.types import AlgoState

# Texts that name no file that a run reads, by reason.
NO_FILES = {
    "names of things in megarl, in the data or in other settings": """
        data.prompt_key data.label_key data.source_key data.default_source algo.name algo.filter.names
        algo.advantage.estimator algo.shapers algo.cpo.method algo.cpo.difficulty_field algo.cpo.hint.*
        algo.policy_loss.name algo.correction.name algo.demonstrations.* algo.off_policy.* algo.kl.* algo.aggregation
        *.pipeline_layout *.served_name *.sources environment.default environment.key rewards.sources.*.scorer
        rewards.sources.*.format rewards.custom.name rewards.custom.functions.*.name rewards.judges.*.server
        rewards.judges.*.endpoint.model rewards.hybrid.* sft.chat_key sft.answer_key train_preference.objective
        algo.advantage.components algo.cpo.coefficients data.columns* *_key *_column *_field""",
    "texts that are compared as settings": """
        data.system_prompt rollout.stop rewards.judges.*.system rewards.judges.*.template rewards.judges.*.criteria.*
        rewards.judges.*.verdict.* rewards.judges.*.sampling.extra_body""",
    "addresses, and names of variables": "*.servers *.writers *.urls *_env cluster.*",
    "places that a run writes to": "run.dir run.name rewards.judges.*.cache logging.*",
    "settings that a resumed run may change": "rollout.engine.* checkpoint.accept_changed",
    "packages, which are not compared as those of Python are not": "rewards.code.import_paths",
}


def text_settings(kind: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of all settings that may hold a text; * stands for the names in a mapping."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        for each in fields(kind):
            yield from text_settings(hints[each.name], f"{key}.{each.name}".lstrip("."))
    elif kind is str or kind is Any:
        yield key
    elif get_origin(kind) is not Literal:
        is_mapping = isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping)
        for each in get_args(kind)[1:] if is_mapping else get_args(kind):
            yield from text_settings(each, f"{key}.*" if is_mapping and is_dataclass(each) else key)


def test_each_setting_is_among_the_inputs_or_has_a_reason_not_to_be() -> None:
    found = set(text_settings(Config))
    assert {"model.path", "environment.entries.*.arguments", "teachers.*.model_path", "data.train.path"} <= found
    reasons = [pattern for patterns in NO_FILES.values() for pattern in patterns.split()]
    listed = {key: (_is_in(key, (*FILES, *FREE)), _is_in(key, reasons)) for key in found}
    assert {key for key, (is_input, has_reason) in listed.items() if is_input == has_reason} == set()


def changed_by(file: Path) -> None:
    """Change a file as an editor does, its size and time too."""
    file.write_bytes(file.read_bytes() + b"#")


Settings = Callable[[Path], dict[str, Any]]
# By the file that is changed: the command, and settings that name it.
CASES: dict[str, tuple[Command, Settings]] = {
    "train.jsonl": ("train", lambda at: {"data": {"train": [f"{at}/train.jsonl"]}}),
    "mixed.jsonl": ("train", lambda at: {"data": {"train": [{"path": f"{at}/mixed.jsonl", "weight": 2.0}]}}),
    "val.jsonl": ("train", lambda at: {"data": {"val": [f"{at}/val.jsonl"]}}),
    "chats.jsonl": ("sft", lambda at: {"sft": {"train": [f"{at}/chats.jsonl"]}}),
    "pairs.jsonl": ("train-preference", lambda at: {"train_preference": {"train": [f"{at}/pairs.jsonl"]}}),
    "rated.jsonl": ("train-reward", lambda at: {"train_reward": {"train": [f"{at}/rated.jsonl"]}}),
    "model/config.json": ("train", lambda at: {"model": {"path": f"{at}/model"}}),
    "model/tokenizer.json": ("train", lambda at: {"model": {"path": f"{at}/model"}}),
    "model/chat_template.jinja": ("sft", lambda at: {"model": {"path": f"{at}/model"}}),
    "model/model.safetensors": ("train", lambda at: {"reference": {"model_path": f"{at}/model"}}),
    "reward.py": ("train", lambda at: {"rewards": {"custom": {"path": f"{at}/reward.py"}}}),
    "helper.py": ("train", lambda at: {"rewards": {"custom": {"path": f"{at}/reward.py"}}}),
    "part/deep.py": ("train", lambda at: {"rewards": {"custom": {"path": f"{at}/reward.py"}}}),
    "grammar.json": (
        "train",
        lambda at: {"rewards": {"custom": {"path": f"{at}/reward.py", "arguments": {"of": [f"{at}/grammar.json"]}}}},
    ),
    "tools.py": ("train", lambda at: entry("tools", tools=[f"{at}/tools.py:look"])),
    "game.py": ("train", lambda at: entry(f"{at}/game.py:Game")),
    "played.py": ("train", lambda at: entry("played:Game")),
    "loss_parts/losses.py": ("train", lambda at: entry("tools", tools=["loss_parts.losses:look"])),
    "server.py": ("train", lambda at: entry("mcp", server=f"{sys.executable} {at}/server.py --fast")),
    "tasks.json": ("train", lambda at: entry("tools", data={"tasks": f"{at}/tasks.json"})),
    "adapter/adapter_config.json": (
        "train",
        lambda at: {"actor": {"lora": {"rank": 8, "path": f"{at}/adapter"}}, "model": {"dtype": "float32"}},
    ),
}
MODULES = {
    "reward.py": "import json, helper\nfrom part.deep import x",
    "helper.py": "",
    "part/deep.py": "",
    "part/__init__.py": "",
    "loss_parts/__init__.py": "",
}


def entry(type_: str, **arguments: Any) -> dict[str, Any]:
    return {"environment": {"entries": {"e": {"type": type_, "arguments": arguments}}}}


def run_of(root: Path, settings: Mapping[str, Any], **checkpoint: Any) -> Config:
    sections = {"data": {"train": ["a.parquet"]}, **settings, "run": {"dir": str(root / "runs"), "name": "a"}}
    return from_dict(Config, {**sections, "checkpoint": checkpoint})


def begin(root: Path, command: Command, settings: Mapping[str, Any]) -> None:
    """Write the files of the settings, and a checkpoint of a run that began with them."""
    names = {*CASES, *MODULES}
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(MODULES.get(name, "{}"))
    config = run_of(root, settings)
    save(config, command, RunInputs.of(texts_of(config), command))


def save(config: Config, command: Command, files: RunInputs) -> None:
    path = checkpoint_dir(Path(config.run.dir, "a", "checkpoints"), 1)
    path.mkdir(parents=True)
    state = RunState(
        command=command,
        step=1,
        num_optimizer_steps=1,
        sampler={},
        algo=AlgoState(),
        source={},
        score=None,
        config=config,
        inputs=files.to_json(),
    )
    (path / "state.json").write_text(state.to_json())
    mark_complete(path)


@pytest.mark.parametrize("name", CASES)
def test_a_changed_file_is_refused_by_name_or_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    command, settings = CASES[name][0], CASES[name][1](tmp_path)
    begin(tmp_path, command, settings)
    config = run_of(tmp_path, settings)
    # Another time alone does not matter, nor does what the command does not read.
    os.utime(tmp_path / name, (1, 1))
    found = find_checkpoint(config, command)
    assert found is not None
    assert len(resume_notes(found, config, RunInputs.of(texts_of(config), command))) == 1
    changed_by(tmp_path / name)
    with pytest.raises(ConfigError) as refused:
        find_checkpoint(config, command)
    assert str(tmp_path / name) in str(refused.value)
    key = str(refused.value).rpartition("checkpoint.accept_changed=[")[2].removesuffix("]")
    accepted = run_of(tmp_path, settings, accept_changed=[key])
    found = find_checkpoint(accepted, command)
    assert found is not None
    notes = resume_notes(found, accepted, RunInputs.of(texts_of(accepted), command))
    assert f"changed since the checkpoint: {key}: {tmp_path / name}" in notes


def test_what_another_command_reads_may_change(tmp_path: Path) -> None:
    settings = {"data": {"train": [f"{tmp_path}/train.jsonl"]}, "sft": {"train": [f"{tmp_path}/chats.jsonl"]}}
    begin(tmp_path, "sft", settings)
    changed_by(tmp_path / "train.jsonl")
    assert find_checkpoint(run_of(tmp_path, settings), "sft") is not None


def test_equal_files_may_lie_elsewhere_and_come_in_no_other_order(tmp_path: Path) -> None:
    def settings(*names: str) -> dict[str, Any]:
        return {"data": {"train": [f"{tmp_path}/{name}" for name in names]}}

    begin(tmp_path, "train", settings("train.jsonl", "val.jsonl"))
    (tmp_path / "train.jsonl").write_text("1")
    (tmp_path / "runs").rename(tmp_path / "old")
    config = run_of(tmp_path, settings("train.jsonl", "val.jsonl"))
    save(config, "train", RunInputs.of(texts_of(config), "train"))
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    assert find_checkpoint(run_of(tmp_path, settings("moved.jsonl", "val.jsonl")), "train") is not None
    with pytest.raises(ConfigError, match=r"with other settings: data\.train"):
        find_checkpoint(run_of(tmp_path, settings("val.jsonl", "moved.jsonl")), "train")


def test_large_files_are_recognised_by_their_ends_and_by_their_full_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_SMALL", 8)
    monkeypatch.setattr(inputs, "_END", 2)
    file, config = tmp_path / "train.jsonl", run_of(tmp_path, {"data": {"train": [f"{tmp_path}/train.jsonl"]}})

    def changes(content: bytes, mtime_s: int) -> list[int]:
        file.write_bytes(content)
        os.utime(file, (mtime_s, mtime_s))
        return [len(each) for each in RunInputs.of(texts_of(config), "train").changes_since(saved)]

    file.write_bytes(b"0123456789")
    os.utime(file, (1, 1))
    begun = RunInputs.of(texts_of(config), "train")
    saved = begun.to_json()
    assert changes(b"0123456789", 1) == [0, 0, 0]
    assert changes(b"0123456780", 1) == [1, 0, 0]
    # The run ended before it knew the full hash.
    assert changes(b"0123456789", 2) == [0, 0, 1]
    os.utime(file, (1, 1))
    begun._hash_large()
    saved = begun.to_json()
    assert changes(b"0123456789", 3) == [0, 0, 0]
    assert changes(b"01234x6789", 4) == [1, 0, 0]


def test_what_a_run_writes_itself_is_no_input(tmp_path: Path) -> None:
    config = run_of(tmp_path, entry("tools", tools=[], log=f"{tmp_path}/log.txt", tasks=f"{tmp_path}/tasks.json"))
    for name in ("log.txt", "tasks.json"):
        (tmp_path / name).write_text("")
    files = RunInputs.of(texts_of(config), "train")
    with (tmp_path / "log.txt").open("a") as log:
        log.write("1")
    os.utime(tmp_path / "log.txt", (1, 1))
    assert [name for name, _ in files.to_json()["environment.entries.e.arguments.tasks"]] == [f"{tmp_path}/tasks.json"]
    assert files.to_json()["environment.entries.e.arguments.log"] == []
