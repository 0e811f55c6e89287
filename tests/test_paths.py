"""A path that nobody can look up is said in words, on every way in; ~ is a home folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import rwkv_spec
from rwkv_spec.cli import main
from rwkv_spec.errors import CheckpointError, UserError
from rwkv_spec.paths import expanded, is_folder
from tests.checkpoint.layouts import golden_file

NOBODY = "~nobody-has-this-name/a.pth"
LONG = "a" * 300 + ".pth"


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert expanded("~/a.pth") == tmp_path / "a.pth"
    assert expanded(Path("a~.pth")) == Path("a~.pth")


def test_names_that_cannot_be_looked_up_are_no_folder(tmp_path: Path) -> None:
    assert is_folder(tmp_path)
    assert not any(is_folder(tmp_path / name) for name in ("none", LONG, "a\0b"))


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", NOBODY],
        ["convert", NOBODY, "b.pth"],
        ["convert", str(golden_file("x070")), NOBODY],
        ["generate", NOBODY, "--prompt", "1"],
        ["generate", str(golden_file("x070")), "--tokenizer", f"vocab:{NOBODY}", "--prompt", "1"],
    ],
    ids=lambda words: words[0],
)
def test_a_home_folder_of_nobody_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert f"{NOBODY}: the home folder in it is not known" in capsys.readouterr().err


def test_a_name_that_is_too_long_is_said_to_be(tmp_path: Path) -> None:
    for source, target in ((tmp_path / LONG, tmp_path / "b.pth"), (golden_file("x070"), tmp_path / LONG)):
        with pytest.raises(CheckpointError, match=r"cannot be (read|written): .*too long"):
            rwkv_spec.convert(source, target)
    with pytest.raises(CheckpointError, match="too long"):
        rwkv_spec.load(tmp_path / LONG)
    with pytest.raises(UserError, match=r"cannot be written: embedded null"):
        rwkv_spec.convert(golden_file("x070"), tmp_path / "a\0b.pth")
    assert list(tmp_path.iterdir()) == []
