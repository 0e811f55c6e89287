"""What lies at a path where weights were looked for, in words: a folder, nothing, or a file of another kind."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

# As much of a file as is looked at to tell what it is.
HEAD_BYTES = 1024


def describe_missing(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"{path}: does not exist, and neither does the folder {parent}"
    names = sorted(entry.name for entry in parent.iterdir())
    near = get_close_matches(path.name, names, n=3, cutoff=0.6)
    near += [name for name in names if name.startswith(path.name + ".") and name not in near]
    if near:
        return f"{path}: does not exist; near it in {parent}: {', '.join(near[:3])}"
    weights = [name for name in names if name.endswith((".pth", ".safetensors"))]
    return f"{path}: does not exist; weights files in {parent}: {', '.join(weights[:5]) or 'none'}"


def describe_folder(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    weights = [name for name in names if name.endswith((".pth", ".safetensors"))]
    weights += sorted(f"out/{entry.name}" for entry in (path / "out").glob("*.pth"))
    if weights:
        return f"{path}: is a folder; name one of its weights files: {', '.join(weights[:8])}"
    holds = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{path}: is a folder ({f'it holds {holds}' if names else 'it is empty'}); name a weights file"


def describe_content(head: bytes) -> str:
    text = _text_of(head)
    if text is not None and text.startswith("version https://git-lfs"):
        size = re.search(r"^size (\d+)", text, re.MULTILINE)
        of_size = f" of {int(size.group(1)):,} bytes" if size else ""
        return f"is a Git LFS pointer, not the weights{of_size}; run `git lfs pull` or download the file itself"
    if text is not None and text.lstrip("\ufeff \t\r\n").lower().startswith(("<!doctype", "<html", "<?xml")):
        return "is a web page saved under this name; download the file itself (the raw link, logged in where needed)"
    if text is not None:
        return f"is text, not weights; it starts with {text.strip()[:40]!r}"
    if head[257:262] == b"ustar":
        return "is a tar archive; unpack it, or save the weights again with torch.save or as safetensors"
    if head.startswith(b"GGUF"):
        return "is a GGUF file (llama.cpp); get the .pth or .safetensors of the same model"
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!", b"\x28\xb5\x2f\xfd")):
        return "is a compressed archive; unpack it first"
    if head.startswith(b"PK\x05\x06"):
        return "is a zip archive without files"
    if not head.strip(b"\0"):
        return "starts with nothing but zero bytes, as an unfinished download does; fetch it again"
    return "is neither a torch nor a safetensors file; its first bytes are " + head[:8].hex(" ")


def _text_of(head: bytes) -> str | None:
    """The head as text, or None where it is none. The cut may fall inside a character."""
    if b"\0" in head:
        return None
    for cut in range(4 if len(head) == HEAD_BYTES else 1):
        try:
            return head[: len(head) - cut].decode("utf-8")
        except UnicodeDecodeError:
            continue
    return None
