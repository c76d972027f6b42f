"""Seeds of samples."""

import hashlib

from megarl.types.seeds import sample_seed


def test_seed_is_half_of_the_blake2b_hash_of_the_key() -> None:
    digest = hashlib.blake2b(b"7/12/megarl/sums:3/5", digest_size=8).digest()
    value = sum(byte << (8 * i) for i, byte in enumerate(digest))
    assert sample_seed(7, 12, "megarl/sums:3", 5) == value // 2


def test_seed_fits_a_signed_integer_and_differs_with_every_part_of_the_key() -> None:
    keys = [(run, step, uid, i) for run in (0, 1) for step in (1, 11) for uid in ("a:1", "a:11") for i in range(8)]
    seeds = {sample_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert 0 <= min(seeds) <= max(seeds) < 2**63
