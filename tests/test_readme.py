"""What README says is true: its commands run, its Python runs, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_every_link_to_a_file_leads_to_one() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_set_up_is_the_two_commands() -> None:
    install = 'pip install -c constraints.txt -e ".[test]" && pytest'
    run = "pip install -c constraints.txt -e . && accelerate launch -m rwkv_spec specs/angles.yaml"
    assert [block.strip() for block in blocks("sh")] == [run, install]


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+\.\d+ \['[\d ]+'\]$", done.stdout, flags=re.MULTILINE), done.stdout


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_their_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "specs", tmp_path / "specs")
    (block,) = blocks("console")
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) >= 8
    for command in commands:
        assert command[0] == "rwkv-spec"
        done = subprocess.run(
            [sys.executable, "-m", "rwkv_spec", *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip(), command
