"""The documentation is whole: every page can be reached, every link leads somewhere, and the site builds from it."""

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tools.site_hooks import APPENDED, GENERATED, OUTSIDE, slug

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Place on the site → the page in the repository.
PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))} | {
    place: ROOT / name for place, name in OUTSIDE.items()
}
every_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_every_page_has_its_place_in_the_navigation() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    entries = [entry for section in sections for pages in section.values() for entry in pages]
    places = [place for entry in entries for place in (entry.values() if isinstance(entry, dict) else [entry])]
    assert sorted(places) == sorted([*PAGES, *GENERATED])
    assert PAGES.keys() >= APPENDED.keys()


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    """In the repository; tools/site_hooks.py makes of it what leads there on the site."""
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        if target.suffix == ".md":
            assert target.resolve() in [each.resolve() for each in PAGES.values()], f"{link}: no page of the site"
            headings = re.findall(r"^#+ (.*)$", prose(target), flags=re.MULTILINE)
            assert not anchor or anchor in {slug(heading) for heading in headings}, link


@every_page
def test_tables_and_lists_stand_apart(page: Path) -> None:
    """mkdocs takes them for text after the line of a paragraph, and a list's paragraphs unless four columns in."""
    lines = prose(page).splitlines()
    begins = re.compile(r"\||[-*] |\d+\. ")
    pairs = [(above, line) for above, line in pairwise(lines) if begins.match(line) and above]
    assert [pair for pair in pairs if not re.match(rf" {{1,3}}\S|{begins.pattern}", pair[0])] == []
    assert [line for above, line in pairwise(lines) if not above and re.match(r" {1,3}\S", line)] == []


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.long
def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    """Long, because it installs mkdocs."""
    site = tmp_path / "site"
    make = [shutil.which("make") or "make", "docs", f"DOCS_VENV={tmp_path / 'venv'}", f"SITE={site}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(site).with_suffix(".md").as_posix(): path for path in site.rglob("*.html")}
    assert pages.keys() == PAGES.keys() | GENERATED.keys() | {"404.md"}
    for page in pages.values():
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(https?://[^\" >]*)", page.read_text())
        assert fetched == [], page
    found = {entry["location"] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    assert {"index.html", "commands.html#exit-codes"} <= found
