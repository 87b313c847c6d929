"""What ``accelerate launch`` would start: asked of accelerate itself, in a short-lived process of its Python.

Its plugins (FSDP, DeepSpeed, FP8, Megatron, …) are environment variables, which accelerate computes from flags and
configuration files; any copy of its rules here would lose a setting of the next version.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainer.contract.errors import RequestError, printable

PROGRAM = """\
import contextlib, io, json, os, subprocess, sys
answer = {}
class Captured(BaseException):
    pass
try:
    with contextlib.redirect_stdout(sys.stderr):
        import torch.distributed.run as torchrun
        from accelerate.commands import launch
        before = dict(os.environ)
        def run(args):
            parser = torchrun.get_args_parser()
            known = {action.dest: action for action in parser._actions}
            answer["torchrun"] = {
                name: str(value) for name, value in vars(args).items()
                if name in known and name not in ("help", "training_script", "training_script_args", "module")
                and value is not None and value is not False and str(value) != str(known[name].default)
            }
            answer["env"] = dict(os.environ)
            raise Captured
        class Popen(subprocess.Popen):
            def __init__(self, command, *rest, env=None, **named):
                if env is None:  # a program that it asks about the machine
                    super().__init__(command, *rest, **named)
                    return
                answer.update(command=list(map(str, command)), env=dict(env))
                raise Captured
        args = launch.launch_command_parser().parse_args(json.loads(sys.argv[1]))
        if args.config_file is not None:
            args.config_file = os.path.abspath(args.config_file)
        os.chdir(sys.argv[2])  # it may write into its working folder
        torchrun.run = run
        launch.subprocess.Popen = Popen
        launch.launch_command(args)
except Captured:
    answer["env"] = {name: value for name, value in answer["env"].items() if before.get(name) != value}
except SystemExit:
    sys.exit(2)
except ModuleNotFoundError as error:
    answer = {"missing": error.name or str(error)}
except BaseException as error:  # whatever accelerate raises is the answer
    answer = {"problem": " ".join(str(error).split()) or type(error).__name__}
print(json.dumps(answer))
"""
"""Runs accelerate's own launcher up to the moment in which it would start processes: torchrun's agent, or a command."""


class AccelerateLaunch(msgspec.Struct, kw_only=True):
    """The processes that accelerate would start."""

    env: dict[str, str] = {}
    torchrun: dict[str, str] | None = None
    """Flags of torchrun that it would give, without those at their default; None if it starts a command."""
    command: list[str] = []
    problem: str = ""
    """Reason why accelerate refuses; empty if it does not."""
    missing: str = ""


def ask_accelerate(python: str, argv: Sequence[str]) -> AccelerateLaunch:
    """Return what ``accelerate launch WORDS`` would start; ``python`` is an interpreter that has accelerate."""
    timeout_s = 120.0  # importing accelerate and torch takes seconds, on a network disk a minute
    try:
        with tempfile.TemporaryDirectory(prefix="gputrain-") as folder:
            done = subprocess.run(
                [python, "-P", "-c", PROGRAM, json.dumps(list(argv)), folder],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise RequestError(f"accelerate gave no answer within {timeout_s:.0f} s about what it would start") from None
    except OSError as error:
        raise RequestError(f"{python} cannot be started: {error.strerror}") from None
    lines = done.stdout.strip().splitlines()
    try:
        answer = msgspec.json.decode(lines[-1] if done.returncode == 0 and lines else "", type=AccelerateLaunch)
    except msgspec.MsgspecError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RequestError(f"accelerate refuses the command: {printable(last[0])}") from None
    if answer.missing:
        raise RequestError(
            f"the command has settings that accelerate itself must translate, and {Path(python)} has no "
            f"{answer.missing}: name the accelerate of the training by its path, or install it there"
        )
    if answer.problem:
        raise RequestError(f"accelerate refuses the command: {printable(answer.problem)}")
    return answer
