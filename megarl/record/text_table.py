"""Lay out tables for terminals."""

from collections.abc import Collection, Sequence

from megarl.host.unicode import visible


def align(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Lay out rows as lines with columns of equal width, aligned right except for the columns `left`.

    Hidden characters of a cell show.

    >>> align([["a", "1"], ["bb", "10"]])
    ['a    1', 'bb  10']
    """
    rows = [list(map(visible, row)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{text:{'<' if i in left else '>'}{widths[i]}}" for i, text in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines
