"""Which tokenizer a checkpoint's vocabulary rows can belong to: as many ids as rows, or rows padded a little."""

from __future__ import annotations

# A published vocabulary is often padded to a round number of rows; more than this is another vocabulary.
_ROW_MULTIPLE = 256


def mismatch(*, num_rows: int, num_ids: int) -> str | None:
    """Both numbers in words where they do not belong together, None where they do."""
    if num_ids <= num_rows <= -(-num_ids // _ROW_MULTIPLE) * _ROW_MULTIPLE:
        return None
    return f"the checkpoint has {num_rows} vocabulary rows and the tokenizer {num_ids} ids"
