"""Derive seeds and random draws from hashes of what identifies them, so order, batching and resuming do not matter."""

import hashlib
from typing import Literal


def sample_seed(run_seed: int, step: int, uid: str, sample_index: int) -> int:
    """Return the seed of one generation request: 63 bits of a hash of what identifies the sample.

    >>> sample_seed(0, 1, "p", 0) == sample_seed(0, 1, "p", 1)
    False
    """
    return _hash64(f"{run_seed}/{step}/{uid}/{sample_index}", "little") >> 1


def span_seed(seed: int, num_tokens: int) -> int:
    """Return the seed with which a sample of this seed goes on after `num_tokens` sampled tokens: its own after 0.

    A sample is seeded anew where new weights come and where another request goes on with it. The next tokens depend
    on the tokens so far and on this seed alone, so they can be sampled again.

    >>> span_seed(7, 0)
    7
    """
    return _hash64(f"{seed}/{num_tokens}", "little") >> 1 if num_tokens else seed


def try_seed(seed: int, index: int) -> int:
    """Return the seed of one of several turns that a sample of this seed writes side by side: its own for the first.

    >>> try_seed(7, 0)
    7
    """
    return _hash64(f"{seed}/try {index}", "little") >> 1 if index else seed


def batch_seed(run_seed: int, step: int) -> int:
    """Return the seed of a step's random choices over its rows.

    >>> batch_seed(0, 1) == batch_seed(0, 2)
    False
    """
    return sample_seed(run_seed, step, "", -1)


def uniform(*key: object, byteorder: Literal["little", "big"] = "little") -> float:
    """Return a number in [0, 1) from a hash of the key, spread evenly over keys.

    byteorder: how the hash of the key's joined parts is read as a number.

    >>> 0 <= uniform("p", 3) < 1
    True
    """
    return (_hash64("/".join(map(str, key)), byteorder) >> 11) / 2**53


def _hash64(key: str, byteorder: Literal["little", "big"]) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), byteorder)
