"""This machine's end of the connection to a host: sends the host's program, calls its functions, and reads frames.

``host_frames`` has the protocol. Everything that comes from a host is untrusted: it is bounded, and decoded by type.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

import gputrain_tui
import trainer
from gputrain_tui.hosts.first_answers import FirstAnswers
from gputrain_tui.hosts.host_frames import FrameBuffer, FrameError, HostFrame, frame
from gputrain_tui.hosts.host_pipes import SSH_FAILED, HostPipes, explain_failure
from gputrain_tui.tables import printable
from trainer.contract.schema import MAX_INT_BITS

MODULES = {
    "trainer.contract": "errors home_folder stop_level",
    "trainer.host": "addresses boot cores cpu_cgroup descendants gpu_claims import_path memory nvml ports "
    "proc_files processes reachability resource_limits stop_request temporary_folder",
    "gputrain_tui.hosts": "host_agent host_frames host_names host_program host_session inventory machine_facts "
    "node_facts push_target",
}
"""By package, the modules of the program that runs on a host: ``host_program`` and all that it imports."""

BOOTSTRAP = """\
import sys
if sys.version_info < (3, 10):
    sys.exit("python3 is %d.%d" % sys.version_info[:2])
from importlib.machinery import ModuleSpec
SOURCES = {sources!r}
class Importer:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in SOURCES:
            return ModuleSpec(name, Importer, is_package=not SOURCES[name])
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        name = module.__name__
        exec(compile(SOURCES[name], name + ".py", "exec"), module.__dict__)
sys.meta_path.insert(0, Importer)
from gputrain_tui.hosts.host_program import main
main(sys.argv[1:])
"""
READER = 'import os,sys;p=b"";exec("while len(p)<{0}:p+=os.read(0,{0}-len(p))or sys.exit()");exec(p)'
"""Python program that executes the source on its standard input and leaves the rest of the input to that source. In
single quotes it is one word to every shell, and no shell changes a character of it."""

MAX_NOISE_BYTES = 1 << 20
"""Limit of the output of a host's start-up files, on each of both streams."""
MAX_TEXT_CHARS = 1000
"""Limit of one text in an answer: names are short, and tables must stay readable."""
ANSWER_S = 15.0
"""Time limit of a host's answer to a small question, connecting and its own unanswered connections included."""
CHECK_S = 0.2
"""Interval at which the size of standard error, a file, is checked."""
END_S = 1.0
"""Time that the program may take to end after its input has ended; then ssh is killed."""
EXIT_S = 10.0
"""Time that ssh may take to end after its output has ended."""

T = TypeVar("T")
CLOCK = msgspec.json.Decoder(float)
"""Made before any thread: msgspec crashes if several threads decode a type for the first time."""


class HostError(Exception):
    """A host gives no answer or an invalid one; the message is one line."""


class HostRefusedError(HostError):
    """A host gives no answer, and another connection would not change that."""


@cache
def packed_program() -> bytes:
    """Return the source of the program that runs on a host."""
    sources = {"trainer": "", "gputrain_tui": ""}
    for package, modules in MODULES.items():
        first, _, rest = package.partition(".")
        folder = Path(str((trainer if first == "trainer" else gputrain_tui).__file__)).parent / rest
        sources[package] = ""
        for name in modules.split():
            sources[f"{package}.{name}"] = (folder / f"{name}.py").read_text(encoding="utf-8")
    return BOOTSTRAP.format(sources=sources).encode()


class HostChannel:
    """The connection to a host, for one thread at a time; any thread may kill its pipes."""

    def __init__(self, host: str, pipes: HostPipes, mark: str) -> None:
        """Take a connection whose program runs, or gets its source from the caller."""
        self.host = host
        self.answered = False
        self.mark = mark
        self.pipes = pipes
        self._input = FrameBuffer(mark.encode())
        self._unsent = b""
        self._calls = 0
        self._answers: dict[int, HostFrame] = {}
        """Answers that nobody has taken yet, by call."""

    @classmethod
    def started(cls, host: str, command: Callable[[Sequence[str]], list[str]], *, quoted: bool = True) -> HostChannel:
        """Start the program on a host; ``command`` makes the command line here of arguments of the host's Python."""
        mark, program = f"gputrain-{secrets.token_hex(8)}:", packed_program()
        reader = READER.format(len(program))
        argv = command(["-I", "-c", f"'{reader}'" if quoted else reader, mark])
        try:
            pipes = HostPipes.started(argv)
        except OSError as error:
            raise HostRefusedError(f"{argv[0]} cannot be run: {error.strerror}") from None
        channel = cls(host, pipes, mark)
        channel._unsent = program
        return channel

    @property
    def noise_bytes(self) -> int:
        """What start-up files of the host have printed on its standard output."""
        return self._input.skipped_bytes

    # --- calls --------------------------------------------------------------------------------------------------

    def send(self, function: str, /, **arguments: Any) -> int:
        """Call a function without waiting, and return the number of the call."""
        self._calls += 1
        self._unsent += frame(self._calls, "call", arguments, name=function).encoded()
        self._write()
        return self._calls

    def first_answer(self, first: FirstAnswers, timeout_s: float) -> None:
        """Wait for any answer of the host, at most until the deadline of all; raise as ``answer`` does."""
        began = time.monotonic()
        self.answer(self.send("clock"), CLOCK, timeout_s, left_s=lambda: first.left_s(began))
        first.add(began)

    def answer(
        self,
        call: int,
        decoder: msgspec.json.Decoder[T],
        timeout_s: float = ANSWER_S,
        *,
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> T:
        """Return the answer to a call, which is waited for as long as both limits allow.

        Make the decoder before any thread: msgspec crashes if several threads decode a type for the first time.

        Raises:
            HostError: none came in time, or the decoder refuses it.
            HostRefusedError: the host refuses the call, or another connection would not help.
        """
        began = time.monotonic()
        while call not in self._answers:
            waited_s = time.monotonic() - began
            remaining_s = min(timeout_s - waited_s, left_s())
            if remaining_s <= 0:
                raise HostError(f"it did not answer within {round(waited_s, 1):g} s")
            for arrived in self.frames(min(remaining_s, CHECK_S)):
                if arrived.kind in ("answer", "error") and 0 < arrived.call <= self._calls:
                    self._answers[arrived.call] = arrived
        return decoded(self._answers.pop(call), decoder)

    def call(
        self, function: str, decoder: msgspec.json.Decoder[T], timeout_s: float = ANSWER_S, /, **arguments: Any
    ) -> T:
        """Call a function, and return its answer; raise as ``answer`` does."""
        return self.answer(self.send(function, **arguments), decoder, timeout_s)

    def frames(self, timeout_s: float, wake_fd: int | None = None) -> list[HostFrame]:
        """Return the frames that have arrived, after waiting for the host or for ``wake_fd`` to be readable."""
        stdin, stdout = self.pipes.stdin, self.pipes.stdout
        watched = [stdout] if wake_fd is None else [stdout, wake_fd]
        readable, writable, _ = select.select(watched, [stdin] if self._unsent else [], [], timeout_s)
        if writable:
            self._write()
        if self.pipes.stderr_bytes() > MAX_NOISE_BYTES:
            raise HostRefusedError(f"it printed more than {MAX_NOISE_BYTES >> 20} MiB on its standard error")
        if stdout not in readable:
            return []
        part = os.read(stdout, 1 << 18)
        if not part:
            raise self._failure()
        self._input.add(part)
        try:
            found = list(self._input.frames())
        except FrameError:
            raise HostError("it sent no valid answer") from None
        self.answered = self.answered or bool(found)
        if not self.answered and self._input.skipped_bytes > MAX_NOISE_BYTES:
            raise HostRefusedError(f"it printed more than {MAX_NOISE_BYTES >> 20} MiB, but no answer")
        return found

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self.pipes.stdin, self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # ssh has ended: ``frames`` raises with the reason
            self._unsent = b""

    def _failure(self) -> HostError:
        code = self.pipes.exit_code(EXIT_S)
        if self.answered and code in (0, None, SSH_FAILED):
            return HostError("the connection ended")
        if code is None:
            return HostRefusedError("it closed its standard output before it answered")
        why = explain_failure(self.host, code, self.pipes.stderr()) if code else "it sent no valid answer"
        return HostError(why) if self.answered or code == SSH_FAILED else HostRefusedError(why)

    # --- the end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(at_once=error[0] is not None)

    def close(self, *, at_once: bool = False) -> None:
        """End the program on the host and ssh, which is killed if ``at_once`` or after ``END_S``."""
        self.pipes.close_stdin()
        if not at_once:
            self.pipes.exit_code(END_S)
        self.pipes.close()


def decoded(arrived: HostFrame, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the JSON of a frame; HostRefusedError for the error of a call, HostError for other types or sizes."""
    try:
        if arrived.kind == "error":
            raise HostRefusedError(printable(str(json.loads(arrived.data)))[:MAX_TEXT_CHARS])
        value = decoder.decode(arrived.data)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise HostError("it sent no valid answer") from None
    if not _is_bounded(msgspec.to_builtins(value)):
        raise HostError("it sent no valid answer")
    return value


def _is_bounded(value: Any) -> bool:
    """Whether all texts and integers of an untrusted answer are short enough for tables and arithmetic."""
    if isinstance(value, dict | list | tuple):
        return all(map(_is_bounded, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return len(value) <= MAX_TEXT_CHARS
    return not isinstance(value, int) or value.bit_length() <= MAX_INT_BITS  # byte counts fit
