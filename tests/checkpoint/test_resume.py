"""What a resume may change: a key that the state's version did not know is no change while it stays at its default."""

from __future__ import annotations

from rwkv_spec.checkpoint.resume import Settings, changes


def test_a_key_that_the_state_does_not_know_may_only_have_its_default() -> None:
    recorded = Settings({"seed": 1, "checkpoint.dropout": 0.5}, {})
    same = Settings({**recorded.values, "checkpoint.resize_vocab": False}, {})
    other = Settings({**recorded.values, "checkpoint.resize_vocab": True}, {})
    assert changes(recorded, same) == []
    assert changes(recorded, other) == ["checkpoint.resize_vocab: none → True"]
    # The other way round nothing is excused: a key that is gone was somebody's choice.
    assert changes(other, recorded) == ["checkpoint.resize_vocab: True → none"]
    assert changes(recorded, Settings({"seed": 42, "checkpoint.dropout": 0.5}, {})) == ["seed: 1 → 42"]
