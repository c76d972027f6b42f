"""What was read last is kept, and measured once."""

from megarl.vision.recent import Recent


def test_what_was_read_last_is_kept() -> None:
    made, measured = list[str](), list[str]()

    def make(key: str) -> str:
        made.append(key)
        return key

    def size_of(value: str) -> int:
        measured.append(value)
        return 40

    kept = Recent[str](80, make, size_of)
    assert [kept[key] for key in "abacabb"] == [*"abacabb"]
    assert made == [*"abcb"]
    # Not what is kept at every look: there may be thousands.
    assert measured == made


def test_one_is_kept_whatever_its_size() -> None:
    made = list[str]()
    kept = Recent[str](10, lambda key: made.append(key) or key, lambda _: 40)
    assert [kept[key] for key in "aabba"] == [*"aabba"]
    assert made == [*"aba"]
