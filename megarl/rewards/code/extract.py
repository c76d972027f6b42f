"""The program in a response."""

import re
import textwrap

# What ends a block is not taken, for it may be the fence of the next one.
_BLOCK = re.compile(
    r"^[ \t]*```(?:python3?|py)[ \t]*\n(.*?)(?=^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE
)


def extract_code(response: str) -> str | None:
    """The last block fenced as Python, after `</think>` if there is one; None if there is none.

    A block that the end of the response cuts off counts: its program may be whole.
    """
    blocks = _BLOCK.findall(response.rpartition("</think>")[2])
    return textwrap.dedent(blocks[-1]) if blocks else None
