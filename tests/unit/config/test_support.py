"""The table of what works where is what checks say, and pages claim nothing that it refuses."""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from megarl.config.support import (
    NEVER,
    PAGE,
    REFUSED,
    TARGETS,
    WORKS,
    Feature,
    cell,
    features,
    targets,
    with_table,
)

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/configuration.md"})]
# How sentences name targets; the place that comes first counts.
PLACES = (
    (r"(CUDA )?without Transformer Engine", ("cuda",)),
    (r"Transformer Engine", ("engine",)),
    (r"\bCUDA\b(?! IPC)|\bGPUs?\b|\bH[12]00", ("engine", "cuda")),
    (r"\bCPUs?\b", ("cpu",)),
)


@functools.cache
def cells() -> dict[str, dict[str, str]]:
    """By feature and target."""
    return {each.name: {name: cell(each, name, target) for name, target in targets().items()} for each in features()}


def test_the_page_has_the_table() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page == with_table(page)
    assert all(f"| {each.name}" in page for each in features())


def test_nothing_that_was_run_is_refused() -> None:
    for each in features():
        assert set(each.run) <= TARGETS.keys(), each.name
        assert set(each.slower) <= set(each.run), each.name
        assert REFUSED not in [cells()[each.name][name] for name in each.run], each.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Transformer Engine computes float8, and no packed rows in float32; CPUs have neither it nor CUDA.
        ("layers in float8", (REFUSED, NEVER, REFUSED)),
        ("float32", (WORKS, REFUSED, WORKS)),
        ("CUDA IPC", (REFUSED, WORKS, WORKS)),
        ("shared prefixes", (WORKS, NEVER, WORKS)),
        ("DeepEP", (REFUSED, NEVER, NEVER)),
    ],
)
def test_cells_that_are_known(name: str, expected: tuple[str, ...]) -> None:
    assert tuple(cells()[name].values()) == expected


def test_a_feature_is_refused_only_for_what_it_sets() -> None:
    """What stands beside it passes on every target on which the feature could be used."""
    for each in features():
        alone = Feature(name="beside", settings=each.beside, run=())
        for name, target in targets().items():
            if cells()[each.name][name] != REFUSED:
                assert alone.refusal(target) is None, each.name
            refusal = each.refusal(target) or ""
            assert not refusal or any(part.split("=")[0].split(".")[-1] in refusal for part in each.settings), refusal


def sentences(text: str) -> Iterator[tuple[str, str]]:
    """Each after the heading above it, without blocks of code and tables that are written from the code."""
    text = re.sub(r"<!-- from .*?<!-- end -->|```.*?```", "", text, flags=re.DOTALL)
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        for part in re.split(r"\n\n|\n(?= *[-|])|(?<=[.;])\s", body):
            yield heading, " ".join(part.split())


def first(sentence: str, patterns: Iterable[tuple[str, T]]) -> list[T]:
    """What belongs to the pattern that fits first in a sentence, or to several that fit there alike."""
    found = [(at.span(), what) for pattern, what in patterns if (at := re.search(pattern, sentence))]
    return [
        what for span, what in found if span == min((span for span, _ in found), key=lambda span: (span[0], -span[1]))
    ]


def false_claims(text: str) -> list[str]:
    """Sentences about a feature, the first that they name, and a target, that contradict the table."""
    names = [(each.words or rf"`[^`]*{re.escape(key_of(each))}\b[^`]*`", each.name) for each in features()]
    found = []
    for heading, sentence in sentences(text):
        for places, name in itertools.product(first(sentence, PLACES), first(sentence, names)):
            there = {cells()[name][place] for place in places}
            if re.search(r"(never|not|none)( \w+)* run\b", sentence, re.IGNORECASE):
                holds = there <= {NEVER, REFUSED}
            elif re.search(r"refuse", f"{heading} {sentence}", re.IGNORECASE):
                holds = there == {REFUSED}
            else:
                holds = there != {REFUSED}
            if not holds:
                found.append(f"{sentence} [{name}: {there}]")
    return found


def key_of(feature: Feature) -> str:
    """Its last key without the section, which pages often leave out."""
    return feature.settings[-1].partition("=")[0].partition(".")[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_claim_nothing_that_the_table_refuses(page: Path) -> None:
    assert false_claims(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "is_false"),
    [
        ("# Layers\n\nOn CPUs, `actor.fp8` halves the time.", True),
        ("# Layers\n\n`actor.fp8` halves the time on GPUs.", False),
        ("# What is refused\n\n`actor.optimizer.algorithm=muon` on CPUs.", True),
        ("# What is refused\n\nShared prefixes on CPUs; `actor.moe.fuse_router` without Transformer Engine.", False),
        ("# IPC\n\nOn GPUs, `sync.cuda_ipc` has never been run.", True),
        ("# GPUs\n\nFlexAttention needs CUDA. On CPUs rows share prefixes.", False),
        ("# GPUs\n\nOn CPUs, FlexAttention is quick.", True),
    ],
)
def test_false_claims_are_found(text: str, is_false: bool) -> None:
    assert bool(false_claims(text)) is is_false
