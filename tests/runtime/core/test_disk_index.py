"""Which images leave the disk: the least time saved for a byte, in the time since the last use, goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.core.disk_index import ImageFile, to_remove

NOW = 1000.0


def file(name: str, size: int = 10, used_at: float = 0.0, built_s: float = 1.0) -> ImageFile:
    return ImageFile(name, size, used_at, built_s)


def test_the_image_used_longest_ago_goes_first() -> None:
    assert to_remove([file("new", used_at=900), file("old", used_at=100)], 5, NOW) == ["old"]


def test_an_image_that_takes_long_to_build_stays_longer() -> None:
    assert to_remove([file("slow", built_s=60), file("quick", built_s=2)], 5, NOW) == ["quick"]


def test_an_image_that_saves_little_time_for_its_bytes_goes_first() -> None:
    assert to_remove([file("small", size=10), file("large", size=100)], 5, NOW) == ["large"]


def test_nothing_goes_without_need_and_never_is_said_so() -> None:
    assert to_remove([file("a")], 0, NOW) == []
    assert to_remove([file("a"), file("b")], 21, NOW) is None


files = st.lists(
    st.builds(ImageFile, st.uuids().map(str), st.integers(0, 100), st.floats(0, NOW), st.floats(0, 100)), max_size=8
)


@given(files, st.integers(-10, 400))
def test_what_goes_suffices_and_every_image_that_goes_was_needed(found: list[ImageFile], short: int) -> None:
    removed = to_remove(found, short, NOW)
    sizes = {each.name: each.bytes for each in found}
    if removed is None:
        assert sum(sizes.values()) < short
    else:
        assert sum(sizes[name] for name in removed) >= short
        assert not removed or sum(sizes[name] for name in removed[:-1]) < short
