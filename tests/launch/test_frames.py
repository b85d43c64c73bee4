"""Ranks' lines survive whatever a launcher does to them on the way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.launch import frames
from hvdtrain.launch.frames import Decoder, Ended, Line, Note, Started, encode, encode_ended

TAGS = {
    "open mpi 4": lambda rank: f"[1,{rank}]<stdout>:",
    "open mpi 5": lambda rank: f"[1,{rank}]<stdout>: ",
    "horovodrun gloo": lambda rank: f"[{rank}]<stdout>:",
}


def decode(data: bytes, chunk: int = 1 << 20) -> list[frames.Event]:
    decoder = Decoder()
    events = [event for at in range(0, len(data), chunk) for event in decoder.feed(data[at : at + chunk])]
    return events + list(decoder.close())


def framed(rank: int, text: str, **more: bool) -> bytes:
    return b"".join(encode(rank, f"node{rank}", "o", text, **more))


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=3000).filter(lambda text: not set(text) & set("\n\r\x1d\x1e\x1f")), chunk=st.integers(1, 100))
def test_any_line_comes_back_whole(text: str, chunk: int) -> None:
    clean = text.encode("utf-8", "backslashreplace").decode()
    assert decode(framed(3, text), chunk) == [Line(3, "node3", "out", clean)]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("seed", range(20))
def test_frames_of_four_ranks_that_a_launcher_cut_and_mixed_are_put_together(tag: str, seed: int) -> None:
    """As Open MPI 4 does: it reads up to 4096 bytes of a rank, and puts a tag before them and after each newline inside."""
    source = random.Random(seed)
    said = {
        rank: [f"{rank} {number} " + "x]<y[1,0]<stdout>:" * source.randint(0, 30) for number in range(50)] for rank in range(4)
    }
    left = {rank: b"".join(framed(rank, text) for text in lines) for rank, lines in said.items()}
    stream = b""
    while any(left.values()):
        rank = source.choice([rank for rank in left if left[rank]])
        size = source.randint(1, 4096)
        piece, left[rank] = left[rank][:size], left[rank][size:]
        mark = TAGS[tag](rank).encode()
        stream += mark + piece[:-1].replace(b"\n", b"\n" + mark) + piece[-1:]
    events = decode(stream, source.randint(1, 5000))
    assert all(isinstance(event, Line) for event in events)
    for rank, lines in said.items():
        assert [event.text for event in events if isinstance(event, Line) and event.rank == rank] == lines


def test_what_has_no_frame_is_the_launchers_own() -> None:
    data = b"warning: x\n" + framed(0, "hi") + b"[1,2]<stderr>:python: can't open file\n" + b"no newline"
    assert decode(data) == [
        Note("warning: x"),
        Line(0, "node0", "out", "hi"),
        Note("python: can't open file", 2),
        Note("no newline", 2),
    ]


def test_text_before_a_frame_on_the_same_line_is_kept() -> None:
    assert decode(b"banner " + framed(0, "hi")) == [Note("banner "), Line(0, "node0", "out", "hi")]


def test_started_and_ended_carry_values_of_any_length() -> None:
    info = {"code": 1, "error": "é\n\x1e", "traceback": "line\n" * 2000}
    data = b"".join(encode(2, "n", "s", "")) + b"".join(encode_ended(2, "n", info))
    assert decode(data, 7) == [Started(2, "n"), Ended(2, "n", info)]


def test_a_carriage_return_marks_progress_and_bad_bytes_are_made_text() -> None:
    assert decode(framed(1, "50 %", progress=True)) == [Line(1, "node1", "out", "50 %", progress=True)]
    assert decode(framed(1, b"\xff\xfe".decode("utf-8", "backslashreplace"))) == [Line(1, "node1", "out", "\\xff\\xfe")]


def test_short_lines_with_open_mpi_s_tags_fit_into_its_buffer() -> None:
    """Whatever 4096 bytes it reads: a tag of the longest kind before them and after each newline, 8192 bytes in all."""
    stream = b"".join(frame for number in range(300) for frame in encode(0, "n", "o", str(number % 10)))
    for offset in range(frames.MIN_FRAME):
        read = stream[offset : offset + 4096]
        assert len(read) + 50 * (1 + read.count(b"\n")) <= 8192


def test_a_frame_fits_into_one_atomic_write() -> None:
    longest = max(len(frame) for frame in encode(10**6, "h" * 253, "o", "\U0001f600" * 5000))
    assert longest <= 4096


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=400), chunk=st.integers(1, 50))
def test_any_bytes_are_decoded_to_something(data: bytes, chunk: int) -> None:
    for event in decode(data, chunk):
        assert isinstance(event, (Line, Started, Ended, Note))
