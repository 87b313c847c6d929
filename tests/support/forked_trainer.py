"""``python -m trainer`` forked from a server that has torch loaded, which starts in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from waiting import LIMIT_S

from trainer.contract.builtin_tasks import BUILT_IN

TASKS = [target.partition(":")[0] for target in BUILT_IN.values()]
# The server ends with the test run: it notices the end of this process.
context = multiprocessing.get_context("forkserver")
ENGINE = ["trainer.engine.worker", "trainer.checkpoint", "trainer.__main__"]
# The compiler too: what runs in these processes without the trainer's worker would import it in each.
context.set_forkserver_preload(["trainer.agent.preload_torch", "trainer.agent.preload_compiler", *ENGINE, *TASKS])


class ForkedTrainer:
    """Process of ``python -m trainer`` with these words."""

    def __init__(self, words: Sequence[str], *, cwd: Path = Path(), environ: Mapping[str, str] = os.environ) -> None:
        self.words = words
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        for path in self._outputs:
            path.touch()
        arguments = (list(words), str(cwd.absolute()), dict(environ), [str(path) for path in self._outputs])
        self._process = context.Process(target=_run, args=arguments)
        self._process.start()

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Wait for the process to end; return its exit code, stdout and stderr."""
        self._process.join(LIMIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        stdout, stderr = (path.read_text() for path in self._outputs)
        self._folder.cleanup()
        assert self._process.exitcode is not None
        return subprocess.CompletedProcess(self.words, self._process.exitcode, stdout, stderr)


def _run(words: list[str], cwd: str, environ: dict[str, str], outputs: list[str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    for descriptor, path in zip((0, 1, 2), (os.devnull, *outputs), strict=True):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    sys.argv = ["trainer", *words]
    sys.path[:0] = [cwd, *environ.get("PYTHONPATH", "").split(os.pathsep)]
    from trainer.__main__ import main

    sys.exit(main())
