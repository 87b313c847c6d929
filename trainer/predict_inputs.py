"""``python -m trainer.predict_inputs``: predictions with a checkpoint's weights, one JSON line for each input.

The console, which does not import torch, runs it. Torch is imported only after the request is checked, so that refusals
come at once.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import warnings
from argparse import ArgumentParser
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from trainer.agent.rank_failure import error_line
from trainer.contract.errors import CheckpointError, ExitCode, MachineNotReadyError, RequestError, print_message, quoted
from trainer.contract.options import Training
from trainer.contract.record.checkpoints import is_dcp_folder
from trainer.contract.schema import check, describe, read_flags, unknown_option
from trainer.host.user_code import innermost_user_line, printing_to_stderr

STDIN = "-"
TEXT = "text"
"""Column of an input that is a line of plain text."""
_HEADER = re.compile(rb'(?=.*,)(?:["\w]+,)*"?text"?(?:,["\w]+)*\r?')
"""First line of a table with commas and a column ``text``."""
_NO_TABLE = "give the column of texts alone, one a line, or JSON objects with text"


class InputRow(dict[str, Any]):
    """One input by column; a column that it lacks is refused with the place of the row."""

    def __init__(self, columns: Mapping[str, Any], where: str) -> None:
        super().__init__(columns)
        self.where = where
        """Such as ``reviews.jsonl, line 3``."""

    def __missing__(self, column: str) -> Any:
        known = ", ".join(map(quoted, self)) or "none"
        raise RequestError(f"{self.where}: there is no column {quoted(column)}; its columns are {known}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; an error is one line on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, training_flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = ArgumentParser(prog="python -m trainer.predict_inputs", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path, help="a file, or a folder, whose newest intact checkpoint is used")
    parser.add_argument("--run", default="", help="only a checkpoint of this run")
    parser.add_argument("--input", default=STDIN, help="a file; - reads lines from standard input")
    parser.add_argument("--batch", type=int, default=64, help="most inputs of one prediction")
    parser.add_argument("--program", default="trainer", help="name of the program in messages")
    parser.add_argument("--note", default="", help="line for people, printed before the first prediction")
    args = parser.parse_args(own)
    try:
        with printing_to_stderr() as output:
            _predict(args.checkpoint, args.run, args.input, args.batch, training_flags, args.program, args.note, output)
    except (RequestError, CheckpointError) as error:
        print_message(str(error), program=args.program)
        return ExitCode.REFUSED if isinstance(error, MachineNotReadyError) else ExitCode.BAD_REQUEST
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail too
        return ExitCode.FINISHED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print_message(f"cannot write standard output: {error.strerror}", program=args.program)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.STOPPED
    return ExitCode.FINISHED


def _predict(
    checkpoint: Path,
    run: str,
    source: str,
    batch: int,
    training_flags: Sequence[str],
    program: str,
    note: str,
    output: BinaryIO,
) -> None:
    training, rest = _read_training(training_flags)
    if source != STDIN and not Path(source).is_file():
        raise RequestError(f"--input {source}: {'is no file' if Path(source).exists() else 'does not exist'}")

    # numpy is no dependency; torch warns of that while it is imported.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

    from trainer.tasks.registry import load_task
    from trainer.tasks.task import Task

    kind = load_task(training.task)
    schema = describe(kind.Options)
    values, unknown = read_flags(rest, schema)
    flags = {option.name: option.flag for option in schema}
    if unknown:
        raise unknown_option(unknown[0], training.task, flags.values())
    task = kind(check(kind.Options, values, where=lambda name: flags.get(name, name)))
    if kind.predict is Task.predict:
        raise RequestError(f"task {training.task} has no predict(model, rows)")
    if is_dcp_folder(checkpoint):
        model = _model_of_folder(task, checkpoint, training, program)
    else:
        model = _model_of_checkpoint(task, checkpoint, run, training)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    encoder = msgspec.json.Encoder()
    with torch.inference_mode():
        for rows in _batches(task, source, batch):
            for prediction in _predictions(task, model, rows):
                if note:  # not before: what is refused has not predicted
                    print_message(note, program=program)
                    note = ""
                output.write(encoder.encode(prediction) + b"\n")
            output.flush()


def _predictions(task: Any, model: Any, rows: Sequence[InputRow]) -> Iterator[Any]:
    """Yield the predictions for rows; where they fail together, of each alone, up to the one that is to blame."""
    try:
        predictions = task.predict(model, rows)
    except Exception as error:  # of a task of the user's own, which may raise anything
        if len(rows) > 1:
            for row in rows:
                yield from _predictions(task, model, [row])
            return
        if isinstance(error, RequestError | CheckpointError):
            raise
        message = f"{rows[0].where}: {type(task).__name__}.predict() fails: {error_line(error)}"
        where = innermost_user_line(error.__traceback__)
        raise RequestError(f"{message} ({where})" if where else message) from error
    if not isinstance(predictions, Sequence) or len(predictions) != len(rows):
        raise RequestError(f"{type(task).__name__}.predict() must return a list with one dict for each row")
    yield from predictions


def _model_of_checkpoint(task: Any, checkpoint: Path, run: str, training: Training) -> Any:
    """Return the model with a checkpoint's weights; restore the task's state."""
    from trainer.checkpoint import open_checkpoint, weights_of
    from trainer.engine.task_state import TASK_STATE, restore
    from trainer.tasks.registry import is_same_task

    path, state, _ = open_checkpoint(checkpoint, flag="--checkpoint", run=run)
    if state.get("task") is not None and not is_same_task(str(state["task"]), training.task):
        raise RequestError(f"{path} is a checkpoint of task {state['task']}, not of {training.task}")
    if task_state := state.get(TASK_STATE):
        restore(task, task_state, source=str(path))
    elif task_state is None and _has_state(task):
        raise RequestError(f"{path} does not hold the state of its task, such as a vocabulary: it cannot predict")
    model = task.model()
    try:
        model.load_state_dict(weights_of(state, source=str(path)))
    except RuntimeError as error:
        raise RequestError(f"{path} does not fit this model: {' '.join(str(error).split())[:300]}") from None
    return model


def _model_of_folder(task: Any, folder: Path, training: Training, program: str) -> Any:
    """Return the model with the weights of a DCP folder; what the task knows of its data, it reads there."""
    from trainer.checkpoint import fit, open_weights
    from trainer.data.seeds import seed_all
    from trainer.engine.task_state import without_task_state

    if _has_state(task):
        print_message(without_task_state(str(folder)), program=program)
        seed_all(training.seed)
        task.datasets()
    model = task.model()
    own = model.state_dict()
    weights = open_weights(folder, model=own)
    fitting, misfits = fit(weights.tensors, own)
    if misfits:
        raise RequestError(f"{folder} does not fit this model, {misfits}")
    model.load_state_dict(weights.load(fitting))
    return model


def _has_state(task: Any) -> bool:
    from trainer.tasks.task import Task

    return type(task).state_dict is not Task.state_dict


def _read_training(words: Sequence[str]) -> tuple[Training, list[str]]:
    """Return the options of the training, of which the task counts, and the flags of the task."""
    known = describe(Training)
    values, rest = read_flags(words, known)
    flags = {option.name: option.flag for option in known}
    training = check(Training, values, where=lambda name: flags.get(name, name))
    if not training.task:
        raise RequestError("--task is missing: after --, give the flags of the training")
    return training, rest


def _batches(task: Any, source: str, size: int) -> Iterator[list[InputRow]]:
    """Yield the inputs in order, at most ``size`` at a time, and from a pipe those that have come."""
    own = None if source == STDIN else task.read_inputs(Path(source))
    if own is not None:
        rows = (InputRow(columns, f"{source}, {index}") for index, columns in enumerate(own, start=1))
        while batch := list(islice(rows, size)):
            yield batch
        return
    if source == STDIN:
        yield from _rows(sys.stdin.buffer, "standard input", size)
        return
    if Path(source).suffix.lower() in (".csv", ".tsv"):
        raise RequestError(f"--input {source}: is a table, whose other columns would count as text: {_NO_TABLE}")
    with Path(source).open("rb") as file:
        yield from _rows(file, source, size)


def _rows(file: BinaryIO, name: str, size: int) -> Iterator[list[InputRow]]:
    """Yield the rows of a file's lines: JSON objects if the first one is one, else plain text.

    Those before a line that is refused are yielded first.
    """
    number, is_json = 0, None
    for lines in _lines(file):
        for start in range(0, len(lines), size):
            rows: list[InputRow] = []
            for line in lines[start : start + size]:
                number += 1
                if is_json is None:
                    line = line.removeprefix(BOM_UTF8)
                    is_json = line.lstrip().startswith(b"{")
                    if _HEADER.fullmatch(line):
                        raise RequestError(f"{name}, line 1: is the header of a table: {_NO_TABLE}")
                try:
                    rows.append(_row(line, f"{name}, line {number}", is_json=is_json))
                except RequestError:
                    if rows:
                        yield rows
                    raise
            yield rows


def _lines(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the lines of a file, as many at once as have come."""
    rest = b""
    # read1 returns what is there, where read would wait for a slow writer to fill its buffer.
    for chunk in chain(iter(lambda: file.read1(1 << 16), b""), [b""]):  # type: ignore[attr-defined]
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def _row(line: bytes, where: str, *, is_json: bool) -> InputRow:
    if is_json:
        try:
            if not line.strip():
                raise RequestError(f"{where}: is empty, where the first line is a JSON object")
            columns = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{where}: is no JSON object like the first line: {error}") from None
        return InputRow(columns, where)
    try:
        return InputRow({TEXT: line.decode("utf-8").removesuffix("\r")}, where)
    except UnicodeDecodeError:
        raise RequestError(f"{where}: is no UTF-8") from None


if __name__ == "__main__":
    sys.exit(main())
