"""The page of other trainers' names."""

from pathlib import Path

from megarl.migrate.aliases import ABSENT, ALIASES
from megarl.migrate.document import COMMAND, PAGE, render_peers

ROOT = Path(__file__).parents[3]
# Settings of earlier versions of megarl, which no other framework has.
OURS = ("sync.transport",)


def test_the_page_is_what_the_tables_say() -> None:
    written = (ROOT / PAGE).read_text()
    assert written == render_peers(), f"{PAGE} is stale; renew it in the repository's root: {COMMAND}"
    assert {f"`{name}`" for name in (*ALIASES, *ABSENT) if name not in OURS} <= set(written.replace(", ", " ").split())
