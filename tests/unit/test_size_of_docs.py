"""The documentation stays short: words and pages by hand, and where the front page leads."""

import re
from pathlib import Path

from megarl.algos.rehearsal import REHEARSALS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Written from the code, beside what the site makes.
GENERATED = {DOCS / "configuration.md"}
WRITTEN = r"<!-- from .*?<!-- end -->"
BY_HAND = [ROOT / "README.md", *sorted(set(DOCS.rglob("*.md")) - GENERATED)]
# The 35th page, of at most 1,200 words, is the map of off-policy methods: formulas, biases, which one to take.
# 200 words came with targets of plans, and with networks and limits of nodes; 300 with the dialects of agents; 150 with
# what sampled, exactly; 140 with what environments say, and ln Z of groups; 120 with images of rows.
# The 36th is for agents: what stood in environments.md, and 330 words on programs such as Claude Code.
# The 37th is on trust: canary, bisect and what explains a step; 200 words came with Prometheus and Ray's own processes,
# 450 with gradients that are compared, spans and the soak; 310 with images in replies, squares, stop texts and proxies;
# 360 with nodes for environments and turns in channels; 300 with what a study of fifteen methods showed.
MAX_WORDS, MAX_PAGES, MAX_LINKS = 39_940, 37, 14


def test_pages_by_hand_are_few_and_short() -> None:
    """Words are counted as `wc -w` does, without tables that are written from the code."""
    texts = {page.name: page.read_text(encoding="utf-8") for page in BY_HAND}
    words = {name: len(re.sub(WRITTEN, "", text, flags=re.DOTALL).split()) for name, text in texts.items()}
    assert len(BY_HAND) <= MAX_PAGES
    assert sum(words.values()) <= MAX_WORDS, words


def test_the_front_page_leads_to_few_pages() -> None:
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 1 < len(set(re.findall(r"\]\(([^)#:]+\.md)[#)]", front))) <= MAX_LINKS


def test_every_part_that_can_be_tried_is_a_seam() -> None:
    seams = (DOCS / "seams.md").read_text(encoding="utf-8")
    assert [registry.key for registry in REHEARSALS if f"`{registry.key}`" not in seams] == []
