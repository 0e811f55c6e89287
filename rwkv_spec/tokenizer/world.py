"""The World tokenizer of RWKV-4 World to RWKV-7 G1: the vocabulary file that was published with them, and no other.

Ids 1..65529 are tokens, 0 ends a document, 65530..65535 are unused; models have 65536 rows.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rwkv_spec.errors import DataError
from rwkv_spec.tokenizer.vocab import VocabTokenizer

FILE_NAME = "rwkv_vocab_v20230424.txt"
NUM_TOKENS, VOCAB_SIZE = 65529, 65536
# Of the tokens and their ids, so that line ends and comments make no difference.
_FINGERPRINT = "812d1d6c57fbe0180c53c623f22af7650d3bfc307f0611bb7f57c7dd3543b88d"
_WAYS_OUT = f"take {FILE_NAME} from the rwkv package (pip install rwkv)"


class WorldTokenizer(VocabTokenizer):
    """`path`: the published file; without one, the copy inside the installed rwkv package. Else a DataError."""

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(find_world_vocab() if path is None else path)
        if self.fingerprint != _FINGERPRINT:
            raise DataError(f"{self.path}: {self._difference()}; {_WAYS_OUT}, or use tokenizer type vocab for it")
        self.vocab_size = VOCAB_SIZE

    def _difference(self) -> str:
        published = f"the published World vocabulary, which has the ids 1 to {NUM_TOKENS}"
        first = next((i for i in range(1, NUM_TOKENS + 1) if i not in self.tokens), None)
        if first is not None:
            return f"holds {len(self.tokens)} tokens, none with id {first}: it is cut off, or not {published}"
        if len(self.tokens) > NUM_TOKENS:
            return f"holds {len(self.tokens)} tokens, up to id {max(self.tokens)}: it is not {published}"
        return f"has other tokens than {published}"


def find_world_vocab() -> Path:
    """The vocabulary file inside the installed rwkv package, which is not imported for it."""
    try:
        package = importlib.util.find_spec("rwkv")
    except ValueError:
        # A program that made up a module of this name.
        package = None
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    raise DataError(
        "tokenizer world needs the published vocabulary, and no installed package brings it: "
        f"pip install rwkv, or give a copy of {FILE_NAME} as path"
    )
