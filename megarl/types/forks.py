"""Describe where tokens do not follow those before them: a conversation that forks is a tree of tokens.

A tree is kept as the list of its tokens, in the order in which they came, with the places where a branch begins. Each
token is there once, under the tokens that stood before it when it was written. Without forks the list is a sequence.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Indices: TypeAlias = npt.NDArray[np.int64]


class Fork(NamedTuple):
    """A place where a branch begins: the token `start` follows the token `after`, -1: none, and not the one before."""

    start: int
    after: int


def branches(num_tokens: int, forks: Sequence[Fork]) -> list[tuple[int, int]]:
    """Return the bounds of the stretches of tokens within which each follows the one before.

    >>> branches(6, [Fork(4, 1)])
    [(0, 4), (4, 6)]
    """
    return list(itertools.pairwise([0, *(fork.start for fork in forks), num_tokens]))


def path_to(end: int, forks: Sequence[Fork]) -> Indices:
    """Return the indices of the tokens on the path from the root to the token before `end`, which it includes.

    >>> path_to(6, [Fork(4, 1)]).tolist()
    [0, 1, 4, 5]
    """
    parts = []
    for fork in reversed(forks):
        if fork.start < end:
            parts.append(np.arange(fork.start, end))
            end = fork.after + 1
    return np.concatenate([np.arange(end), *reversed(parts)])


def path_before(index: int, forks: Sequence[Fork]) -> Indices:
    """Return the indices of the tokens that stand before the token `index`, whether it is there yet or not.

    >>> path_before(4, [Fork(4, 1)]).tolist()
    [0, 1]
    """
    after = next((fork.after for fork in forks if fork.start == index), index - 1)
    return path_to(after + 1, forks)


def num_common(one: npt.NDArray[np.integer], other: npt.NDArray[np.integer]) -> int:
    """Count the first elements that two arrays have in common.

    >>> num_common(np.array([7, 8, 9]), np.array([7, 8, 5, 6]))
    2
    """
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    return int(np.argmax(differ)) if differ.any() else shorter


def longest_known(
    token_ids: npt.NDArray[np.integer], forks: Sequence[Fork], wanted: npt.NDArray[np.integer]
) -> tuple[int, int]:
    """Return how many of the first tokens of `wanted` some path of a tree has, and the index of the last of them.

    Paths of the newest branch come first. The index is -1 if there is none.

    >>> longest_known(np.array([7, 8, 9, 5, 6]), [Fork(3, 1)], np.array([7, 8, 5, 1]))
    (3, 3)
    """
    best = (0, -1)
    for _, end in reversed(branches(len(token_ids), forks)):
        path = path_to(end, forks)
        count = num_common(token_ids[path], wanted)
        if count > best[0]:
            best = (count, int(path[count - 1]))
    return best


def require_forks(forks: Sequence[Fork], *, num_given: int, num_tokens: int, whose: str) -> None:
    """Raise ValueError unless forks ascend, lie after the first `num_given` tokens, and follow a token before them.

    >>> require_forks([Fork(3, 3)], num_given=2, num_tokens=4, whose="row a/0")
    Traceback (most recent call last):
        ...
    ValueError: row a/0: got the fork (3, 3), expected starts that ascend from 2 to 3, each after an earlier token
    """
    least = num_given
    for start, after in forks:
        if not least <= start < num_tokens or not -1 <= after < start:
            raise ValueError(
                f"{whose}: got the fork ({start}, {after}), expected starts that ascend from {num_given} to "
                f"{num_tokens - 1}, each after an earlier token"
            )
        least = start + 1


def after_other_prompt(
    forks: Sequence[Fork], prompt: npt.NDArray[np.integer], other: npt.ArrayLike
) -> tuple[Fork, ...]:
    """Return the forks of the same tokens after another prompt.

    A branch from within the prompt stays where it is if both prompts are the same up to there; else it goes on from the
    end of their common tokens.

    >>> after_other_prompt([Fork(4, 2), Fork(6, 0)], np.array([7, 8, 9]), [7, 1, 2, 8, 9])
    (Fork(start=6, after=4), Fork(start=8, after=0))
    """
    wanted = np.asarray(other)
    moved, last = len(wanted) - len(prompt), len(prompt) - 1
    common = num_common(wanted, prompt)
    return tuple(
        Fork(fork.start + moved, fork.after + moved if fork.after >= last else min(fork.after, common - 1))
        for fork in forks
    )
