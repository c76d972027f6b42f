"""Read verdicts from what judges write."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from megarl.config.judges import JudgeConfig

# The built-in templates ask judges to end with this.
SCORE_PATTERN = r"score\W*:\W*(-?\d+(?:\.\d+)?)"
WINNER_PATTERN = r"winner\W*:\W*(a|b|tie)\b"
WINNER_LABELS: Mapping[str, float] = {"a": 1.0, "b": 0.0, "tie": 0.5}


class VerdictReader:
    """Reads the verdicts that a configuration asks for."""

    def __init__(self, cfg: JudgeConfig) -> None:
        is_pairwise, verdict = cfg.mode == "pairwise", cfg.verdict
        labels = verdict.labels or (WINNER_LABELS if is_pairwise else {})
        self._labels = {word.strip().casefold(): number for word, number in labels.items()}
        self._pattern = re.compile(verdict.pattern or (WINNER_PATTERN if is_pairwise else SCORE_PATTERN), re.IGNORECASE)
        self._cfg = verdict

    def read(self, text: str, keys: Sequence[str]) -> dict[str, float]:
        """Return the verdict for each of `keys`, without those that cannot be read.

        keys: names of the criteria that the text judges, or the configured key; with a pattern, a single one.
        """
        if self._cfg.form == "pattern":
            matches = self._pattern.findall(text)
            found: Mapping[str, object] = {keys[0]: matches[-1]} if matches else {}
        else:
            objects = [each for each in _json_objects(text) if set(keys) & each.keys()]
            found = objects[-1] if objects else {}
        numbers = {key: self._number(found[key]) for key in keys if key in found}
        return {key: number for key, number in numbers.items() if number is not None}

    def _number(self, verdict: Any) -> float | None:
        """Return the number of a verdict, scaled to 0 to 1 if there is a scale; None if it is neither."""
        if isinstance(verdict, bool):
            verdict = "true" if verdict else "false"
        if isinstance(verdict, str) and (word := verdict.strip().casefold()) in self._labels:
            number = self._labels[word]
        else:
            try:
                number = float(verdict)
            except (TypeError, ValueError, OverflowError):
                return None
            if self._labels or not math.isfinite(number):
                return None
        if self._cfg.scale is None:
            return number
        low, high = self._cfg.scale
        return (number - low) / (high - low) if low <= number <= high else None


def combine(votes: Sequence[float], how: str) -> float:
    """Combine votes: their mean or median, or the most frequent one, among equally frequent ones the mean of these."""
    if how == "mean":
        return fmean(votes)
    if how == "median":
        return float(median(votes))
    most = max(map(votes.count, votes))
    return fmean({vote for vote in votes if votes.count(vote) == most})


def _json_objects(text: str) -> Iterator[dict[str, object]]:
    """Yield the JSON objects in a text that lie in no other one."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        else:
            yield value
        start = text.find("{", end)
