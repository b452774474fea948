"""The hash that guards HDF5's superblock."""

from dynscope.salvage import lookup3


def test_lookup3_gives_the_value_that_its_author_published() -> None:
    assert lookup3(b"Four score and seven years ago") == 0x17770551
