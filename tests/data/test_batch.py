"""Every target is trained exactly once an epoch, whatever the batch size, the world and the micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv_spec.data.batch import Batch, batches, rank_share
from rwkv_spec.data.order import epoch_windows, window_index
from rwkv_spec.data.stream import Segment, TokenStream


def stream_of(num_tokens: int) -> TokenStream:
    # Token t is t + 1000, so that a target tells its own place.
    return TokenStream([Segment(np.arange(1000, 1000 + num_tokens), 0, num_tokens)])


def run(
    stream: TokenStream, *, total: int, world: int = 1, first_step: int = 0, **options: object
) -> list[list[Batch]]:
    """For each rank its batches."""
    arguments = {"ctx_len": 17, "batch_size": 11, "order": "shuffle", "seed": 3, **options}
    return [
        list(batches(stream, total_sequences=total, first_step=first_step, rank=rank, world=world, **arguments))  # type: ignore[arg-type]
        for rank in range(world)
    ]


def trained(found: list[Batch]) -> list[int]:
    for batch in found:
        # What a padded place holds is of no weight, and a target always follows its input.
        assert ((batch.targets_BT - batch.ids_BT)[batch.weights_BT > 0] == 1).all()
        assert set(np.unique(batch.weights_BT)) <= {0.0, 1.0}
        assert not batch.ids_BT[batch.weights_BT == 0].any() and not batch.targets_BT[batch.weights_BT == 0].any()
    return [int(t) - 1000 for batch in found for t in batch.targets_BT[batch.weights_BT > 0]]


SIZES = [2, 3, 16, 17, 18, 19, 34, 35, 36, 187, 188, 1000]


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("order", ["shuffle", "sequential"])
def test_an_epoch_trains_every_target_exactly_once(num_tokens: int, order: str) -> None:
    stream = stream_of(num_tokens)
    windows = epoch_windows(num_tokens, ctx_len=17, order=order)
    for epochs in (1, 3):
        (found,) = run(stream, total=epochs * windows, order=order)
        assert sorted(trained(found)) == sorted(list(range(1, num_tokens)) * epochs)
        assert all(batch.num_rows == 11 for batch in found[:-1])


@given(
    st.integers(2, 200),
    st.integers(1, 20),
    st.integers(1, 13),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["shuffle", "sequential", "rwkv-lm"]),
)
def test_any_world_and_split_trains_the_same_rows(
    num_tokens: int, ctx_len: int, batch_size: int, world: int, micro: int, order: str
) -> None:
    if order == "rwkv-lm" and num_tokens < 3 * ctx_len:
        order = "shuffle"
    stream = stream_of(num_tokens)
    total = epoch_windows(num_tokens, ctx_len=ctx_len, order=order)
    options = {"total": total, "ctx_len": ctx_len, "batch_size": batch_size, "order": order}
    (alone,) = run(stream, **options)  # type: ignore[arg-type]
    ranks = run(stream, world=world, **options)  # type: ignore[arg-type]
    most = -(-batch_size // world)
    for step, whole in enumerate(alone):
        pieces = [piece for rank in ranks for piece in rank[step].split(micro, -(-most // micro))]
        assert len(pieces) == world * -(-most // micro)
        real = [
            (n, w, tuple(t)) for p in pieces for n, w, t in zip(p.sequence_B, p.window_B, p.targets_BT, strict=True)
        ]
        wanted = zip(whole.sequence_B, whole.window_B, whole.targets_BT, strict=True)
        assert [row for row in real if row[0] >= 0] == [(n, w, tuple(t)) for n, w, t in wanted]
        assert sum(float(p.weights_BT.sum()) for p in pieces) == float(whole.weights_BT.sum())
        assert all(0 < p.num_rows <= micro for p in pieces)
        assert all(p.ids_BT.shape == p.starts_BT.shape == (p.num_rows, ctx_len) for p in pieces)


def test_filler_rows_have_no_weight_and_no_number() -> None:
    (found,) = run(stream_of(200), total=5)
    pieces = found[0].split(2, 4)
    assert [piece.num_rows for piece in pieces] == [2, 2, 2, 2]
    assert pieces[3].weights_BT.sum() == 0 and (pieces[3].sequence_B == -1).all() and (pieces[3].window_B == -1).all()
    (empty,) = run(stream_of(50), total=1, world=2)[0]
    assert empty.num_rows == 0 and [piece.num_rows for piece in empty.split(4, 1)] == [1]
    with pytest.raises(ValueError, match="do not fit"):
        found[0].split(2, 2)


def test_shares_differ_by_at_most_one_and_leave_nothing() -> None:
    for rows in range(30):
        for world in range(1, 9):
            shares = [rank_share(rows, rank, world) for rank in range(world)]
            assert [row for start, stop in shares for row in range(start, stop)] == list(range(rows))
            sizes = [stop - start for start, stop in shares]
            assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ValueError):
        rank_share(4, 2, 2)


def test_a_resume_continues_with_the_same_rows() -> None:
    stream = stream_of(1000)
    (whole,) = run(stream, total=150)
    (rest,) = run(stream, total=150, first_step=5)
    assert len(whole) == 14
    for one, other in zip(whole[5:], rest, strict=True):
        assert np.array_equal(one.ids_BT, other.ids_BT) and np.array_equal(one.sequence_B, other.sequence_B)
    assert run(stream, total=150, first_step=14) == [[]]


@pytest.mark.parametrize("order", ["shuffle", "sequential", "rwkv-lm"])
@pytest.mark.parametrize(("batch_size", "first_step", "world"), [(1, 0, 1), (11, 3, 2), (300, 1, 3), (1500, 2, 2)])
def test_a_step_reads_the_windows_of_its_sequences(order: str, batch_size: int, first_step: int, world: int) -> None:
    # More sequences than are looked at ahead, and several epochs of them.
    stream, total = stream_of(9000), 5000
    ranks = run(stream, total=total, batch_size=batch_size, first_step=first_step, world=world, order=order)
    sequence = np.concatenate([rank[step].sequence_B for step in range(len(ranks[0])) for rank in ranks])
    assert sequence.tolist() == list(range(first_step * batch_size, total))
    windows = epoch_windows(9000, ctx_len=17, order=order)
    window = window_index(sequence, num_windows=windows, order=order, seed=3)
    found = [rank[step].window_B for step in range(len(ranks[0])) for rank in ranks]
    assert np.concatenate(found).tolist() == window.tolist()
    first = [row[0] - 1000 for step in range(len(ranks[0])) for rank in ranks for row in rank[step].ids_BT]
    assert first == (window * 17).tolist()


def test_types_are_as_promised() -> None:
    (found,) = run(stream_of(100), total=3)
    batch = found[0]
    assert (batch.ids_BT.dtype, batch.targets_BT.dtype, batch.weights_BT.dtype) == (np.int64, np.int64, np.float32)
    assert batch.starts_BT.dtype == np.bool_ and not batch.starts_BT.any()
    assert batch.sequence_B.tolist() == [0, 1, 2]


def test_a_stream_reads_across_its_pieces() -> None:
    pieces = [
        np.arange(5, dtype=np.uint16),
        np.arange(10, 13, dtype=np.int32),
        np.zeros(0, np.uint16),
        np.arange(20, 30),
    ]
    stream = TokenStream([Segment(p, 0, len(p)) for p in pieces[:3]] + [Segment(pieces[3], 2, 9)])
    flat = [0, 1, 2, 3, 4, 10, 11, 12, 22, 23, 24, 25, 26, 27, 28]
    assert stream.num_tokens == len(flat)
    for start in range(len(flat) + 1):
        for count in range(len(flat) - start + 1):
            assert stream.read(start, count).tolist() == flat[start : start + count]
    assert stream.read(0, 3).dtype == np.int64
    for start, count in ((-1, 2), (14, 2), (0, 16), (3, -1)):
        with pytest.raises(IndexError):
            stream.read(start, count)
    assert TokenStream([]).num_tokens == 0
