"""Hooks of mkdocs: README.md and its neighbours are pages of the site, and anchors are those of GitHub.

Links are written for readers of the repository; the site has the same pages in other places.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Pages outside of docs/, by their place on the site.
OUTSIDE = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_config(config: Any) -> Any:
    """Name headings as GitHub does, so that a link leads to the same heading in both."""
    config["mdx_configs"]["toc"]["slugify"] = slug
    return config


def slug(heading: str, separator: str = "-") -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for place, name in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page lead to the places on the site."""
    if page.file.src_uri in OUTSIDE:
        return markdown.replace("](docs/", "](").replace("](README.md", "](index.md")
    for place, name in OUTSIDE.items():
        markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./{re.escape(name)}", rf"](\g<1>{place}", markdown)
    return markdown
