"""Find the first mistake in an answer to a built-in task, from the lines that may come next in a right answer."""

from dataclasses import dataclass

from megarl.data.tasks.base import BuiltinTask, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """This is an answer as far as it is right.

    Attributes:
        lines: the right lines before the first mistake, or all of them.
        mistake: characters from the first wrong one to the end of its line. It reaches one beyond the text where only
            the text's end is wrong; None without a mistake.
        worked: whether the steps that were written lead to the target, so that the answer follows from them.
    """

    lines: tuple[str, ...]
    mistake: slice | None
    worked: bool


def read_answer(task: BuiltinTask, problem: Problem, text: str) -> ReadAnswer:
    """Read an answer up to its first wrong character: the one after which no right answer can begin like this.

    What follows a complete answer is not read.
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
