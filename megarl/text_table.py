"""Tables for terminals."""

from collections.abc import Collection, Sequence


def align(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Rows as lines with columns of equal width, flush right but for the columns `left`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def cell(column: int, text: str) -> str:
        return text.ljust(widths[column]) if column in left else text.rjust(widths[column])

    return ["  ".join(cell(i, text) for i, text in enumerate(row)).rstrip() for row in rows]
