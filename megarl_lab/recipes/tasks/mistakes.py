"""Find the first mistake in an answer to a built-in task, from the lines that may come next in a right answer."""

from dataclasses import dataclass

from megarl_lab.recipes.tasks.base import BuiltinTask, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """The right beginning of an answer to a built-in task, and the place of the first mistake.

    Attributes:
        lines: the right lines before the first mistake, or all lines.
        mistake: the characters from the first wrong one to the end of its line; None without a mistake. If the text
            merely ends too early, the range is the one character beyond the end.
        worked: whether one of the right lines reaches the target, so that the answer follows from the steps.
    """

    lines: tuple[str, ...]
    mistake: slice | None
    worked: bool


def read_answer(task: BuiltinTask, problem: Problem, text: str) -> ReadAnswer:
    """Read an answer until its first wrong character, the first that no right answer with the same beginning could
    have.

    Text after a complete answer is not read.
    """
    lines: list[str] = []
    start, mistake = 0, None
    while expected := task.next_lines(problem, lines):
        line = text[start:].partition("\n")[0]
        if line not in expected:
            right = (n for n in range(len(line) + 1) if any(other.startswith(line[:n]) for other in expected))
            first = start + max(right)
            mistake = slice(first, max(start + len(line), first + 1))
            break
        lines.append(line)
        start += len(line) + 1
    worked = any(line.endswith(f"={problem.target}") for line in lines)
    return ReadAnswer(lines=tuple(lines), mistake=mistake, worked=worked)
