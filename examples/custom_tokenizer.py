"""Train with a tokenizer of your own.

    python examples/custom_tokenizer.py [WORK_DIR]

It needs encode, decode, vocab_size and fingerprint; nothing to inherit from, nothing to register. Id 0 stays
free: it ends a document. This one has an id for each word.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import rwkv_spec

ANIMALS = ("cat", "dog", "hen", "fox", "owl", "cow")
TEXT = "\n".join(
    f"the {first} and the {second} went to the {place} . there the {second} saw the {first} again ."
    for first in ANIMALS
    for second in ANIMALS
    if first != second
    for place in ("wood", "farm", "river", "hill")
)


class WordTokenizer:
    """Words are separated by spaces; a word that was not in `text` is an error, never a guess."""

    def __init__(self, text: str) -> None:
        self._words = sorted(set(text.split()))
        self._ids = {word: index for index, word in enumerate(self._words, start=1)}
        self.vocab_size = len(self._words) + 1
        # Prepared data are kept under this name: when the words change, so must it.
        self.fingerprint = hashlib.sha256("\n".join(self._words).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        unknown = [word for word in text.split() if word not in self._ids]
        if unknown:
            raise ValueError(f"no word of this vocabulary: {unknown[0]}")
        return [self._ids[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._words[index - 1] for index in ids if index)


work_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/custom_tokenizer")
work_dir.mkdir(parents=True, exist_ok=True)
lines = work_dir / "lines.txt"
lines.write_text(TEXT + "\n", encoding="utf-8")

tokenizer = WordTokenizer(TEXT)
spec = {
    "version": 1,
    "name": "custom_tokenizer",
    "work_dir": work_dir,
    "data": {"train": lines, "eval": {"fraction": 0.1}},  # .txt: a document a line
    "model": {"type": "x070", "n_layer": 2, "n_embd": 64, "head_size": 32},
    "train": {"ctx_len": 64, "batch_size": 8, "epochs": 16, "precision": "fp32"},
    "optimizer": {"lr": 4e-3},
    "eval": {"every": {"epochs": 4}, "continuations": 1},
    "save": {"every": {"epochs": 8}},
}
run = rwkv_spec.run(spec, tokenizer=tokenizer)

# The run folder holds no code: whoever generates from it later passes the tokenizer again.
prompts = ["the fox and the owl went to the river . there", "the cow"]
texts = rwkv_spec.generate(run.checkpoint, prompts, tokenizer=tokenizer, max_new_tokens=20, temperature=0)
print()
for prompt, text in zip(prompts, texts, strict=True):
    print(f"{prompt} | {text}")
