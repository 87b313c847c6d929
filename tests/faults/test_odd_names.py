"""A folder whose name is a command to the terminal: real runs quote it in their output, no terminal interprets it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from bench import Bench

EVIL = "\x1b]52;c;eA==\x07\n\x9b2J"
SHOWN = "␛]52;c;eA==␇␊\\u009b2J"


def test_a_run_quotes_a_folder_without_obeying_it(bench: Bench) -> None:
    (bench.folder / EVIL).mkdir()
    words = ["--set", f"train.save_dir={EVIL}", "--set", "train.save_every_updates=2"]
    done = bench.call("run", bench.recipe(4), *words)
    assert done.returncode == 0
    assert f"saved step 4  {SHOWN}" in done.stderr or SHOWN in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "\x9b" not in done.stdout + done.stderr


def test_a_run_on_a_terminal_writes_only_its_own_escape_sequences(bench: Bench) -> None:
    (bench.folder / EVIL).mkdir()
    main, terminal = pty.openpty()
    words = ["run", bench.recipe(4), "--set", f"train.save_dir={EVIL}"]
    process = bench.start(*words, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    terminal_output = bytearray()
    try:
        while part := os.read(main, 1 << 16):
            terminal_output += part
    except OSError:  # the last who had the terminal is gone
        pass
    os.close(main)
    assert process.wait(60) == 0
    assert SHOWN in terminal_output.decode()
    assert b"\x1b]" not in terminal_output
    assert b"\x07" not in terminal_output


@pytest.mark.parametrize("more", [["--resume", EVIL], [f"--lr{EVIL.replace('=', '')}"]], ids=["a file", "a flag"])
def test_the_trainer_alone_quotes_the_control_characters_of_a_refusal(bench: Bench, more: list[str]) -> None:
    data = Path(bench.recipe()).with_name("text.txt")
    flags = "--cpu --task lm --batch-size 4 --max-updates 4 --save-every-updates 2 --threads 1"
    sizes = f"--data {data} --context 16 --dim 8 --layers 1 --heads 1"
    words = [*flags.split(), *sizes.split(), *more]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *words], cwd=bench.folder, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 2
    assert SHOWN[:8] in done.stderr
    assert not {"\x1b", "\x9b", "\x07"} & {*done.stdout, *done.stderr}
