"""Take stock of the files that a run computes from, so that it continues with the same ones.

`FILES` are the settings that name files; texts in `FREE` may. A test requires each setting with a text to be here or
in its list of those that name no input. Settings that a resumed run may change are not compared.
"""

import ast
import hashlib
import importlib.util
import os
import shlex
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import megarl

FILES = (
    *("model.path", "model.config_path", "*.model_path", "*.lora.path", "rewards.judge_servers.*.model"),
    *("data.train", "data.train.path", "data.val", "sft.train", "sft.val", "rollout.replay_dir"),
    *(f"{section}.{part}" for section in ("train_reward", "train_preference") for part in ("train", "val")),
    *("algo.plugins", "rewards.custom.path", "rewards.custom.functions.*.path"),
)
FREE = (
    *("environment.entries.*.type", "environment.entries.*.arguments*", "data.chat_template*", "algo.settings*"),
    *("rewards.custom.arguments*", "rewards.custom.functions.*.arguments*", "rewards.judge_servers.*.args*"),
)
# Sections that some commands alone read.
_READ_BY = {
    "data.train": ("train", "session"),
    **dict.fromkeys(("data.val", "rollout", "rewards", "environment"), ("train",)),
    "sft": ("sft",),
    "train_reward": ("train-reward",),
    "train_preference": ("train-preference",),
}
# The files of a model's, an adapter's or a recording's directory that are read.
_SUFFIXES = {
    *(".json", ".safetensors", ".bin", ".jinja", ".txt", ".model", ".py", ".gguf", ".tiktoken", ".parquet", ".jsonl")
}
# Where Python's modules and megarl's own are.
_HOMES = (Path(os.__file__).parent, Path(megarl.__file__).parent)
# Larger files are hashed in part at once (both ends), and in full in the background.
_SMALL = 4 << 20
_END = 1 << 20


@dataclass(frozen=True, slots=True)
class Print:
    """The marks of a file. head: the hash of a small file, or of a large one's ends. full: the hash of all."""

    size: int
    mtime_ns: int
    head: str
    full: str | None

    @classmethod
    def of(cls, path: Path) -> "Print":
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            is_small = about.st_size <= _SMALL
            content = file.read(_SMALL if is_small else _END)
            if not is_small:
                file.seek(-_END, os.SEEK_END)
                content += file.read()
        head = hashlib.sha256(content).hexdigest()
        return cls(about.st_size, about.st_mtime_ns, head, head if is_small else None)

    def same(self, now: "Print", path: Path) -> bool | None:
        """Return whether the file at `path`, which is `now`, is the same; None: that cannot be told any more."""
        if (self.size, self.head) != (now.size, now.head):
            return False
        if self.mtime_ns == now.mtime_ns or self.full == now.full is not None:
            return True
        return None if self.full is None else self.full == _full(path, now.mtime_ns)


# By setting: each text that names files, with the files by their names below it ("" is the file that it names itself).
Stock = dict[str, list[tuple[str, dict[str, Print]]]]


@dataclass(slots=True)
class RunInputs:
    """The files that a run computes from, as they were when it began."""

    stock: Stock

    @classmethod
    def of(cls, texts: Iterable[tuple[str, str]], command: str) -> "RunInputs":
        """Look at the files that the settings of a command name; one that cannot be read is left to its reader.

        texts: what `texts_of` yields.
        """
        stock: Stock = {}
        for key, text in texts:
            readers = next(
                (own for section, own in _READ_BY.items() if f"{key}.".startswith(f"{section}.")), (command,)
            )
            if command not in readers:
                continue
            is_free = _is_in(key, FREE)
            if is_free or names_file(key):
                for name in _named(text, is_free=is_free):
                    stock.setdefault(key, []).append((name, _prints(name)))
        return cls(stock)

    def hash_in_background(self) -> None:
        """Begin to hash large files in full."""
        threading.Thread(target=self._hash_large, daemon=True, name="hashes of inputs").start()

    def _hash_large(self) -> None:
        for name, prints in [entry for entries in self.stock.values() for entry in entries]:
            for below, each in prints.items():
                path = _path(name, below)
                with suppress(OSError):
                    full = each.full or _full(path, each.mtime_ns)
                    if path.stat().st_mtime_ns == each.mtime_ns:
                        prints[below] = replace(each, full=full)

    def to_json(self) -> dict[str, object]:
        """Return what a checkpoint keeps. Files that an argument names and the run itself writes are not inputs."""
        return {
            key: [
                (name, {below: list(asdict(each).values()) for below, each in prints.items()})
                for name, prints in entries
                if not _is_in(key, FREE) or not _is_written(name, prints)
            ]
            for key, entries in self.stock.items()
        }

    def changes_since(self, saved: Mapping[str, Any]) -> tuple[dict[str, list[str]], set[str], list[str]]:
        """Compare with what a checkpoint keeps.

        Returns:
            By setting, the files that differ; the settings that name equal files elsewhere; and the files of which
            only the time differs, as far as can be told.
        """
        changed, moved, untold = dict[str, list[str]](), set[str](), list[str]()
        for key, entries in saved.items():
            now = self.stock.get(key, [])
            for place, (name, before) in enumerate(entries):
                there = dict(now).get(name)
                if there is None and names_file(key) and len(now) == len(entries):
                    name, there = now[place]
                    moved.add(key)
                for below in sorted({*before, *(there or {})}):
                    path = _path(name, below)
                    if below not in before or there is None or below not in there:
                        is_same: bool | None = False
                    else:
                        is_same = Print(*before[below]).same(there[below], path)
                    if is_same is None:
                        untold.append(f"{key}: {path}")
                    elif not is_same:
                        changed.setdefault(key, []).append(str(path))
        # The weights of a mixture are settings beside its paths.
        weighted = {key.rpartition(".")[0] for key in self.stock}
        return changed, moved - set(changed) - weighted, untold


def names_file(key: str) -> bool:
    """Return whether a setting names a file or directory that a run reads."""
    return _is_in(key, FILES)


def _is_in(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _path(name: str, below: str) -> Path:
    return Path(os.path.normpath(Path(name, below)))


def texts_of(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a configuration with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif is_dataclass(value):
        for each in fields(value):
            yield from texts_of(getattr(value, each.name), f"{key}.{each.name}".lstrip("."))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from texts_of(each, f"{key}.{name}")
    elif isinstance(value, Sequence):
        for each in value:
            yield from texts_of(each, key)


def _named(text: str, *, is_free: bool) -> list[str]:
    """Return the names of files in a text: all of it, or where it is free, those of its words that are files."""
    if not is_free:
        return [_module_file(text) or text]
    with suppress(ValueError):
        words = [text, text.rpartition(":")[0], *shlex.split(text)]
        found = [word for word in words if (Path(word).suffix or os.sep in word) and _is_input(word)]
        return list(dict.fromkeys(found)) or [file for file in [_module_file(text.rpartition(":")[0])] if file]
    return []


def _is_input(word: str) -> bool:
    """Return whether a word names a file that is not a program of the machine, such as an interpreter."""
    with suppress(OSError, ValueError):
        if Path(word).is_file():
            with Path(word).open("rb") as file:
                return file.read(4) != b"\x7fELF"
    return False


def _module_file(name: str) -> str | None:
    """Return the file of a dotted module; None for other texts, and for installed packages, which have versions."""
    top, *rest = name.split(".")
    if not all(part.isidentifier() for part in (top, *rest)) or Path(name).exists():
        return None
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(top)
        places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
        for place in places:
            base = Path(place, *rest)
            for file in (base.with_suffix(".py"), base / "__init__.py"):
                if file.is_file():
                    is_installed = {"site-packages", "dist-packages"} & set(file.parts)
                    return None if is_installed or any(map(file.is_relative_to, _HOMES)) else str(file)
    return None


def _prints(name: str) -> dict[str, Print]:
    """Look at a file, with the modules of its folder that it imports, or at the files of a directory."""
    prints = {}
    for below in sorted(_files(Path(name))):
        with suppress(OSError):
            prints[below] = Print.of(_path(name, below))
    return prints


def _files(path: Path) -> set[str]:
    if path.is_dir():
        return {each.name for each in path.iterdir() if each.suffix in _SUFFIXES and each.is_file()}
    return {os.path.relpath(each, path) if each != path else "" for each in _with_imports(path, path.parent, set())}


def _with_imports(file: Path, folder: Path, seen: set[Path]) -> set[Path]:
    """Return a file and, if it is Python, the modules of its folder that it imports, directly or not."""
    if file in seen or not file.is_file():
        return seen
    seen.add(file)
    if file.suffix == ".py":
        with suppress(SyntaxError, ValueError, RecursionError, OSError):
            for node in ast.walk(ast.parse(file.read_bytes())):
                names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                if isinstance(node, ast.ImportFrom):
                    names = [".".join(filter(None, (node.module, each))) for each in ("", *names)]
                base = file.parent if isinstance(node, ast.ImportFrom) and node.level else folder
                for name in names:
                    parts = name.split(".")
                    for depth in range(1, len(parts) + 1):
                        inner = base.joinpath(*parts[:depth])
                        _with_imports(inner.with_name(f"{inner.name}.py"), folder, seen)
                        _with_imports(inner / "__init__.py", folder, seen)
    return seen


def _is_written(name: str, prints: Mapping[str, Print]) -> bool:
    """Return whether a file other than a program has changed since the run began."""
    with suppress(OSError):
        return not name.endswith(".py") and any(
            _path(name, below).stat().st_mtime_ns != each.mtime_ns for below, each in prints.items()
        )
    return True


@cache
def _full(path: Path, mtime_ns: int) -> str:
    """Hash a file, once as long as its time stays."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
