"""Hooks of mkdocs: README.md and its neighbours are pages of the site, and anchors are those of GitHub.

Links are written for readers of the repository; the site has the same pages in other places. Messages,
metrics and the names that options of other trainers have here are written when the site is made.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# mkdocs reads this file by its path.
sys.path.insert(0, str(ROOT))
from megarl.config.explain import metric_sections  # noqa: E402
from tools import messages  # noqa: E402
from tools.peer_tables import render_peers  # noqa: E402

# Pages outside of docs/, by their place on the site.
OUTSIDE = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def render_metrics() -> str:
    """Return the text of the page metrics.md of the site."""
    return "\n".join(["# Metrics\n", *_metric_lines()])


def _metric_lines() -> Iterator[str]:
    for title, section in metric_sections():
        yield f"## {title}\n\n{section.get('about', '')}\n\n| metric | meaning |\n|---|---|"
        for names, meaning in section["metrics"].items():
            code = ", ".join(f"`{name}`" for name in re.split(r", (?![^{]*\})", names))
            yield f"| {code} | {meaning.replace('|', chr(92) + '|')} |"
        yield ""


# Pages that are only on the site, and what it adds to the end of others.
GENERATED: Mapping[str, Callable[[], str]] = {"messages.md": messages.render, "metrics.md": render_metrics}
APPENDED: Mapping[str, Callable[[], str]] = {"migrating.md": render_peers}


def on_config(config: Any) -> Any:
    """Name headings as GitHub does, so that a link leads to the same heading in both."""
    config["mdx_configs"]["toc"]["slugify"] = slug
    return config


def slug(heading: str, separator: str = "-") -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/ or are made from the code."""
    from mkdocs.structure.files import File

    for place, name in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    for place, render in GENERATED.items():
        files.append(File.generated(config, place, content=render()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page lead to the places on the site."""
    if page.file.src_uri in OUTSIDE:
        return markdown.replace("](docs/", "](").replace("](README.md", "](index.md")
    if page.file.src_uri in APPENDED:
        markdown = f"{markdown}\n{APPENDED[page.file.src_uri]()}"
    for place, name in OUTSIDE.items():
        markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./{re.escape(name)}", rf"](\g<1>{place}", markdown)
    return markdown
