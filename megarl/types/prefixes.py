"""Find the prefixes that rows have in common, so that a model computes each of them once.

Rows with the same first tokens form a tree: a conversation that forks, or the samples of a prompt. Two rows have a
token in common if all tokens up to it are the same in both, and so are the images that these show and the experts
recorded for them, if any.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.types import Row
from megarl.types.arrays import ordering_key
from megarl.types.images import first_other
from megarl.types.rows import paths_of


def count_shared(a: Row, b: Row) -> int:
    """Count the tokens at the beginning of two rows that they have in common, in the same places of the same tree.

    >>> count_shared(row([1, 1]), row([1]))
    2
    """
    # From the first fork that only one of them has, equal tokens follow others.
    count = min(a.num_tokens, b.num_tokens, *(fork.start for fork in {*a.forks} ^ {*b.forks}))
    if (other := first_other(a.images, b.images)) is not None:
        count = min(count, other)
    differ = a.token_ids[:count] != b.token_ids[:count]
    if a.routed_experts is not None and b.routed_experts is not None:
        differ |= (a.routed_experts[:count] != b.routed_experts[:count]).any((1, 2))
    elif a.routed_experts is not b.routed_experts:
        return 0
    return int(differ.argmax()) if differ.any() else count


def num_passed(row: Row, *, shares: bool) -> int:
    """Count the tokens of a row that pass through the layers: of one that forks, each path's if it cannot share.

    >>> num_passed(row([1, 1]), shares=False)
    3
    """
    return row.num_tokens if shares or not row.forks else sum(path.row.num_tokens for path in paths_of([row]))


def family_order(rows: Sequence[Row]) -> list[int]:
    """Order rows, by number, such that those that share a prefix are neighbours, at every depth of their tree.

    Each row shares with the one just before it what it shares with any row before. The branches of a fork come in the
    order of their first rows.

    >>> family_order([row([1]), replace(row([1]), token_ids=np.array([5, 6])), row([1, 1])])
    [0, 2, 1]
    """
    by_tokens = _token_order(rows)
    families = [[i] for i in by_tokens]
    shared = [count_shared(rows[a], rows[b]) for a, b in itertools.pairwise(by_tokens)]
    # From the deepest fork to the root, join the branches of each.
    for depth in sorted(set(shared), reverse=True):
        joined, left, branches = [], [], families[:1]
        for family, count in zip(families[1:], shared, strict=True):
            if count < depth:
                joined.append([*itertools.chain(*sorted(branches))])
                left.append(count)
                branches = []
            branches.append(family)
        families, shared = [*joined, [*itertools.chain(*sorted(branches))]], left
    return families[0] if families else []


def counted_once(rows: Sequence[Row]) -> list[Row]:
    """Let each token of a mini-batch's rows count in the balance of experts in the first row that has it, by family.

    >>> [each.num_uncounted for each in counted_once([row([1]), row([1, 1])])]
    [0, 2]
    """
    order, counted = family_order(rows), list(rows)
    for a, b in itertools.pairwise(order):
        counted[b] = replace(rows[b], num_uncounted=count_shared(rows[a], rows[b]))
    return counted


def held_prefixes(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Return, for each row, the number of a row before it that shares most with it, and how many tokens these are.

    >>> held_prefixes([row([1]), row([1, 1])])
    [(0, 0), (0, 2)]
    """
    by_tokens = _token_order(rows)
    rank = {i: place for place, i in enumerate(by_tokens)}
    found, earlier = list[tuple[int, int]](), list[int]()
    for i, row in enumerate(rows):
        place = bisect.bisect(earlier, rank[i])
        # In the order of tokens, one of the two rows beside this one shares most with it.
        beside = [by_tokens[other] for other in earlier[max(place - 1, 0) : place + 1]]
        count, holder = max(((count_shared(row, rows[other]), -other) for other in beside), default=(0, 0))
        found.append((-holder, count))
        earlier.insert(place, rank[i])
    return found


def _token_order(rows: Sequence[Row]) -> list[int]:
    # After each token stands which one it follows, if that is not the one before, and the image that it shows.
    numbers = {digest: i for i, digest in enumerate(sorted({each.digest for row in rows for each in row.images}), 1)}
    keys = [np.zeros((row.num_tokens, 3 if numbers else 2), np.uint32) for row in rows]
    for key, row in zip(keys, rows, strict=True):
        key[:, 0] = row.token_ids
        for start, after in row.forks:
            key[start, 1] = after + 2
        for image in row.images:
            key[image.places, 2] = numbers[image.digest]
    return sorted(range(len(rows)), key=[ordering_key(key) for key in keys].__getitem__)
