"""Any text comes back from its cell, and any message from its packet."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynscope.runfile.schema import decode, encode, fit
from dynscope.writing.message import Backlog, pack, unpack

# Two surrogates in a row that make a pair are the one exception that the format knows.
LONE = st.text(st.characters(exclude_categories=())).filter(
    lambda text: text == text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
)


@given(LONE, st.sampled_from([32, 64, 256]), st.integers(0, 2**33))
def test_any_text_comes_back_from_its_cell(text: str, width: int, offset: int) -> None:
    cell, rest = fit(encode(text), width, 0)
    assert len(cell) <= width
    assert len(fit(encode(text), width, offset)[0]) <= width
    stored = np.array([cell], dtype=f"S{width}").tolist()[0]
    assert decode(stored, rest) == text


@given(st.dictionaries(st.text(), st.lists(st.floats(width=32)), max_size=3), st.integers())
def test_any_message_comes_back_from_its_packet(arrays: dict[str, list[float]], step: int) -> None:
    sent = {name: np.array(values, np.float32) for name, values in arrays.items()}
    message = unpack(pack("row", {"step": step}, sent))
    assert (message.call, message.arguments) == ("row", {"step": step})
    assert list(message.arrays) == list(sent)
    for name, values in sent.items():
        np.testing.assert_array_equal(message.arrays[name], values)


def test_arrays_of_all_shapes_and_types_come_back() -> None:
    arrays = {
        "scalar": np.array(3), "empty": np.zeros((0, 4)), "bool": np.array([True]),
        "half": np.ones(3, np.float16), "turned": np.arange(6).reshape(2, 3).T,
        "big": np.arange(3, dtype=">i4"),
    }  # fmt: skip
    back = unpack(pack("row", {}, arrays)).arrays
    for name, values in arrays.items():
        assert back[name].shape == values.shape
        assert back[name].dtype == values.dtype
        np.testing.assert_array_equal(back[name], values)


def test_a_backlog_refuses_what_is_too_much_but_never_a_lone_packet() -> None:
    backlog = Backlog(10)
    assert backlog.offer(b"x" * 100)
    assert not backlog.offer(b"y")
    assert backlog.offer(b"z", force=True)
    assert backlog.take(0) == b"x" * 100
    assert backlog.offer(b"y" * 9)
    assert [backlog.take(0), backlog.take(0), backlog.take(0)] == [b"z", b"y" * 9, None]
