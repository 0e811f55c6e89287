"""Train RWKV language models from one YAML spec. The names below are the whole public face, loaded when first used."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "run": "rwkv_spec.api",
    "check": "rwkv_spec.api",
    "plan": "rwkv_spec.api",
    "prepare": "rwkv_spec.api",
    "initialize": "rwkv_spec.api",
    "inspect": "rwkv_spec.api",
    "convert": "rwkv_spec.api",
    "load": "rwkv_spec.api",
    "generate": "rwkv_spec.api",
    "generate_stream": "rwkv_spec.api",
    "Run": "rwkv_spec.training",
    "IntegerTokenizer": "rwkv_spec.tokenizer.integer",
    "AngleTokenizer": "rwkv_spec.tokenizer.integer",
    "VocabTokenizer": "rwkv_spec.tokenizer.vocab",
    "WorldTokenizer": "rwkv_spec.tokenizer.world",
    "GenericTokenizer": "rwkv_spec.tokenizer.vocab",
    "create_vocab_file_from_tokens": "rwkv_spec.tokenizer.vocab",
    "SpecError": "rwkv_spec.errors",
    "DataError": "rwkv_spec.errors",
    "CheckpointError": "rwkv_spec.errors",
    "KernelError": "rwkv_spec.errors",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rwkv_spec' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return list(__all__)
