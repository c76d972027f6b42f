"""Write the rollout browser: a page for all recorded samples of one or several runs, and its data in pieces.

The page works from a disk, where a browser lets pages load scripts but read no files. All data are therefore scripts,
each a call with a text of JSON: an index of columns to filter and sort by, and pieces of texts and of tokens, which the
page loads when they are looked at. `megarl/report/browser` has the page.
"""

import base64
import io
import itertools
import json
import math
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.host.writing import replacing_directory
from megarl.record.metrics import RunPaths, step_of
from megarl.record.rollouts import JudgedAnswer, RolloutRecord, read_answers, read_rollouts

BROWSER = Path(__file__).parent / "browser"
# A piece ends with the sample that brings its texts to this many characters.
PIECE_CHARS = 200_000
# The width and the height of a picture at most.
PICTURE_PIXELS = 128
_IMAGE = re.compile("<image ([0-9a-f]{64})>")
PHASES = ("training", "validation", "validation, greedy")
# Files of training and of validations that are read at most, evenly spread, the first and the last among them.
MOST_FILES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """How many samples of a phase and step were recorded, and how many of them are right."""

    phase: str
    step: int
    num_right: int
    num_samples: int


class _Writer:
    """The writer of one browser's data."""

    def __init__(self, out: Path) -> None:
        # A page that is still open when its data are written anew notices by the version.
        self.out, self.version = out, f"{time.time_ns():x}"
        # Columns have a value per sample, None where it is not known.
        self.columns: defaultdict[str, list[float | None]] = defaultdict(list)
        # The first sample of each piece.
        self.starts: list[int] = []
        # Numbers of prompts, by uid and text, and of data sources.
        self.prompts: dict[tuple[str, str], int] = {}
        self.sources: dict[str, int] = {}
        self._begin_piece()

    def _begin_piece(self) -> None:
        self._texts: list[dict[str, Any]] = []
        self._tokens: list[dict[str, Any] | None] = []
        self._prompts: dict[str, int] = {}
        self._images: dict[str, str] = {}
        self._num_chars = 0

    def add(self, row: RolloutRecord | JudgedAnswer, *, run: int, phase: str, step: int, images: Path) -> None:
        """Add a sample to the index and to the present piece, which is written once it is full. images: a directory."""
        if not self._texts:
            self.starts.append(len(self.columns["run"]))
        tokens = token_values(row) if isinstance(row, RolloutRecord) else {}
        values = {
            "run": run,
            "phase": PHASES.index(phase),
            "step": step,
            "source": self.sources.setdefault(row.data_source, len(self.sources)),
            "prompt": self.prompts.setdefault((row.uid, row.prompt), len(self.prompts)),
            "sample": row.sample_index,
            "right": int(row.correct),
            "reward": _short(row.reward),
            "length": row.num_response_tokens,
            "demonstrated": sum(turn.num_tokens for turn in row.turns if turn.is_given),
            **sample_values(row, tokens),
        }
        for name, value in values.items():
            self.columns[name].append(value)
        if row.prompt not in self._prompts:
            self._prompts[row.prompt] = len(self._prompts)
            self._num_chars += len(row.prompt)
        for text in (row.prompt, *(turn.text for turn in row.turns if turn.is_read)):
            for digest in {*_IMAGE.findall(text)} - self._images.keys():
                if (images / digest).is_file():
                    self._images[digest] = picture_of(images / digest)
                    self._num_chars += len(self._images[digest])
        self._num_chars += len(row.response)
        turns = [
            [turn.author, turn.text, _short(turn.reward), turn.num_tokens]
            + ([] if turn.parent is None else [turn.parent, turn.num_kept])
            for turn in row.turns
        ]
        self._texts.append(
            {
                "prompt": self._prompts[row.prompt],
                **({"turns": turns, "calls": row.num_calls} if turns else {"response": row.response}),
                "truth": row.ground_truth,
                "finish": row.finish_reason,
                **({"details": json.loads(row.details)} if isinstance(row, RolloutRecord) else {}),
            }
        )
        self._tokens.append(tokens or None)
        if self._num_chars >= PIECE_CHARS:
            self.end_piece()

    def end_piece(self) -> None:
        """Write the present piece, if it has a sample, and begin another."""
        if self._texts:
            number = len(self.starts) - 1
            shown = {"images": self._images} if self._images else {}
            self.write(f"texts_{number:05}", {"prompts": list(self._prompts), "samples": self._texts, **shown})
            self.write(f"tokens_{number:05}", self._tokens)
        self._begin_piece()

    def write(self, name: str, data: Any) -> None:
        # A text of JSON, because in a script a key __proto__ means something else. All but ASCII is escaped, so that
        # the file is read alike whatever encoding a browser assumes.
        text = json.dumps(json.dumps(data, separators=(",", ":")))
        (self.out / f"{name}.js").write_text(f'rollouts.receive("{self.version}","{name}",{text})\n', encoding="ascii")


def write_browser(runs: Sequence[tuple[str, RunPaths]], out: Path) -> list[Verdicts]:
    """Write the browser of runs, given with their labels, to a directory that it replaces; return the verdicts on the
    samples of the first run, in the order of steps. Without any recorded sample no directory is left.
    """
    samples = ((number, *sample) for number, (_, paths) in enumerate(runs) for sample in _recorded(paths))
    first = next(samples, None)
    if first is None:
        shutil.rmtree(out, ignore_errors=True)
        return []
    counts: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
    with replacing_directory(out) as partial:
        writer = _Writer(partial)
        for number, phase, step, row in itertools.chain([first], samples):
            writer.add(row, run=number, phase=phase, step=step, images=runs[number][1].root / "images")
            if number == 0:
                counts[phase, step].append(row.correct)
        writer.end_piece()
        index = {
            "runs": [label for label, _ in runs],
            "phases": PHASES,
            "sources": list(writer.sources),
            "uids": [uid for uid, _ in writer.prompts],
            "starts": writer.starts,
            "columns": writer.columns,
        }
        writer.write("index", index)
        for path in (BROWSER / "rollouts.html", *BROWSER.glob("*.js")):
            shutil.copyfile(path, partial / path.name)
        styles = [(BROWSER / name).read_text(encoding="utf-8") for name in ("palette.css", "rollouts.css")]
        (partial / "rollouts.css").write_text("\n".join(styles), encoding="utf-8")
    return [
        Verdicts(phase=phase, step=step, num_right=sum(right), num_samples=len(right))
        for (phase, step), right in counts.items()
    ]


def _recorded(paths: RunPaths) -> Iterator[tuple[str, int, RolloutRecord | JudgedAnswer]]:
    """Yield the samples of a run to show with their phases and steps: those of training, then those of validations."""
    for path in spread(paths.recorded_rollouts()):
        for record in read_rollouts(path):
            yield "training", record.step, record
    for path in spread(paths.recorded_validations()):
        for answer in read_answers(path):
            yield "validation, greedy" if answer.greedy else "validation", step_of(path), answer


def spread(files: Sequence[Path]) -> list[Path]:
    """Return `MOST_FILES` of more files, evenly spread."""
    count = min(len(files), MOST_FILES)
    return [files[round(i * (len(files) - 1) / max(1, count - 1))] for i in range(count)]


def picture_of(image: Path) -> str:
    """Return a small picture of an image that a run has read, as a data URL."""
    from PIL import Image, ImageOps

    small, out = ImageOps.exif_transpose(Image.open(image)).convert("RGB"), io.BytesIO()
    small.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    small.save(out, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(out.getvalue()).decode()}"


def token_values(row: RolloutRecord) -> dict[str, Any]:
    """Return what is known of the tokens of a response: their texts, and a value per token under each name.

    logprob: the engine's. mismatch: how much it exceeds the trainer's. signal: d, what a hint adds to the log-prob.
    base: the advantage before CPO. divergence: that from a teacher.
    """
    values = {
        "logprob": row.rollout_logprobs,
        "mismatch": [
            None if ours is None else ours - theirs
            for ours, theirs in zip(row.rollout_logprobs, row.old_logprobs, strict=bool(row.old_logprobs))
        ],
        "advantage": row.advantage,
        "signal": row.hint_gain,
        "base": row.base_advantage,
        "divergence": row.divergence,
    }
    known = {name: [None if v is None else _short(v) for v in column] for name, column in values.items() if column}
    return {"text": row.tokens, **known} if row.tokens else {}


def sample_values(row: RolloutRecord | JudgedAnswer, tokens: dict[str, Any]) -> dict[str, float | None]:
    """Return a sample's mean log-prob, advantage, signal and divergence, and its largest mismatch, over tokens of its
    own.
    """
    read = [turn.is_read for turn in row.turns for _ in range(turn.num_tokens)] or [False] * len(tokens.get("text", ()))

    def own(name: str) -> list[float]:
        return [v for v, is_read in zip(tokens.get(name, ()), read, strict=False) if v is not None and not is_read]

    return {
        **{name: _mean(own(name)) for name in ("logprob", "advantage", "signal", "divergence")},
        "mismatch": max(map(abs, own("mismatch")), default=None),
    }


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return _short(math.fsum(known) / len(known)) if known else None


def _short(value: float) -> float:
    """Round to four digits, which the page shows."""
    return float(f"{value:.4g}")
