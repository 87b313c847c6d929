"""Outcomes of ranks and nodes, and the root cause among failures.

Torch-free: the node agent applies the rules to the failures of its ranks, the supervisor to those of the nodes.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from trainer.contract.errors import ExitCode, RecordError
from trainer.contract.record import Collective, Failure, RunDir, ThreadStack, write_atomically
from trainer.contract.record.numbers import Count, ExitStatus, Rank, WorldSize
from trainer.contract.record.regular_file import read_json

NO_UPDATE_LEFT = "no_update_left"
"""Kind of the finding that a resumed training had already made all of its updates."""
ENDED_EARLY = "ended_early"
"""Kind of the finding that a training ended before its last step or epoch, and the condition that ended it."""
SEED_ON_RESUME = "seed_on_resume"
"""Kind of the finding that a resumed training was given another seed, and the effect of that."""
SETTINGS_ON_RESUME = "settings_on_resume"
"""Kind of the finding that names the settings of a resumed training that differ from its checkpoint's."""
BEST_NOT_TESTED = "best_not_tested"
"""Kind of the finding that the last weights were tested because ``best.pt`` is gone."""
EVALUATED_CHECKPOINT = "evaluated_checkpoint"
"""Kind of the finding that names the checkpoint of an evaluation."""
REQUEUED = "requeued"
"""Kind of the finding that the run waits in a scheduler's queue to go on, and why."""
AWAITS_HOSTS = "awaits_hosts"
"""Kind of the finding that the next attempt waits until all hosts answer."""
PORT_TAKEN = "port_taken"
"""Kind of the finding that another program took the port of the rendezvous, and the run starts again at another."""
RESTARTED = "restarted"
"""Kind of the finding that another attempt begins, why the one before ended, and what changes for it."""
SOCKET_NOTE = re.compile(r"\[[WI]\d{4} [^\]]* socket\.cpp:\d+\]")
"""Begin of torch's lines about attempts to connect, which it prints before any error and also in sound runs."""
RECORD_END_MISSING = "the end of the record is missing"
"""Part of a run's final message where events could not be written, as on a full disk."""
STOP_STEPS = 3
"""Steps that ranks may take to answer a stop request: the one under way, the next, at whose end all ranks agree to
stop, and one more because step times vary."""
SAVE_TIMEOUT_S = 60.0
"""Seconds that ranks have to save once they have agreed to stop."""


LOST_PEER_KINDS = ("lost_peer", "stalled", "left_early", "silent")
"""Kinds of failures that follow from the loss of another rank."""


class RankReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Report of a rank before its teardown; it counts more than the exit code of the process."""

    finished: bool = False
    failure: Failure | None = None
    stoppable: bool = False
    """From this report on the rank answers a stop request, and saves its work first."""
    step_s: float | None = None
    """Duration of the longer of the last two steps, sent when it has changed much; else None."""
    stopping: bool = False
    """The rank is about to save, because of a stop request or because training is complete."""
    stopped: bool = False
    """The rank has saved after a stop request, and exits."""
    step: int | None = None
    saved: str | None = None
    not_kept: str = ""
    time_ns: int = 0
    not_recorded: str = ""
    """Reason why the end of the rank's record is not on disk; empty when it is."""
    line: str | None = None
    """Line of the user's code at which its main thread stays, empty once it has moved on; None in other reports."""
    stacks: list[ThreadStack] = []
    """Answer to a request for its stacks."""
    collectives: list[Collective] | None = None
    """Its last collectives, which follow its stacks; None in other reports."""
    handles_stack_signal: bool | None = None
    """Whether the script has taken the signal on which stacks are printed; None in other reports."""
    group: tuple[Rank, WorldSize] | None = None
    """Rank and world size of the process group that a script's process has joined; None in other reports."""
    trains: bool = False
    """The script's process has begun to train, in a group or alone."""
    lost_pid: Count | None = None
    """Process for whose end the script failed, in a report of its failure."""


class RankOutcome(msgspec.Struct, kw_only=True):
    """Outcome of one rank's process."""

    exit_code: ExitStatus | None = None
    """None while it runs, and when a signal ended it."""
    signal: str | None = None
    """Name of the signal that ended it, such as ``SIGKILL``."""
    finished: bool = False
    """The rank reported that training was complete; its exit code does not matter then."""


class NodeOutcome(msgspec.Struct, kw_only=True):
    """Outcome of a node, ``nodes/<i>.json``."""

    node: Rank
    host: str
    exit_code: ExitStatus
    ranks: dict[Rank, RankOutcome] = {}
    failure: Failure | None = None
    """The root cause among this node's ranks."""
    left: list[Count] = []
    """Processes that the kernel could not end."""
    stopped_at: Count | None = None
    """Optimizer steps done when its ranks stopped on request."""
    saved: str | None = None
    """The checkpoint of that step, if a rank of this node wrote it."""
    not_kept: str = ""
    unanswered: list[Rank] = []
    """Ranks that were asked to stop and did not answer in time."""
    killed: list[Rank] = []
    """Ranks of a script that were killed as they had not ended after ``stop_grace``, in which it may save."""
    stop_reason: str = ""
    """Source of this node's stop request, such as a signal; empty without one, as when only other nodes had one."""
    not_recorded: str = ""
    """Reason why the end of a rank's record is not on disk; empty when all are."""

    @staticmethod
    def reserve(path: Path, *, ranks: int) -> None:
        """Fill the file with blanks, so that ``write`` has space even on a full disk; readers skip a blank file."""
        path.unlink(missing_ok=True)
        reserved_node_bytes = 4096  # space reserved for a node's outcome, without its ranks and a traceback
        reserved_rank_bytes = 128  # space reserved for each rank in its node's outcome
        with contextlib.suppress(OSError):  # a full disk has no space to reserve
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b" " * (reserved_node_bytes + reserved_rank_bytes * ranks))

    def write(self, path: Path) -> None:
        """Write the file atomically; on a full disk overwrite the reserved one in place, without the traceback."""
        try:
            path.parent.mkdir(exist_ok=True)  # without its parents: a deleted run directory stays deleted
            write_atomically(path, msgspec.json.encode(self))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            failure = self.failure and msgspec.structs.replace(self.failure, traceback=None)
            data = msgspec.json.encode(msgspec.structs.replace(self, failure=failure))
            with path.open("r+b", buffering=0) as file:
                reserved = file.seek(0, 2)
                if len(data) > reserved:
                    raise
                file.seek(0)
                file.write(data.ljust(reserved))  # JSON allows blanks at its end


_decode_node = msgspec.json.Decoder(NodeOutcome)


def node_outcome(run_dir: RunDir, node: int) -> NodeOutcome | None:
    """Return the outcome of a node; None if its file is absent, blank or damaged."""
    try:
        return read_json(run_dir.node_result(node), _decode_node)
    except RecordError:
        return None


# Messages of gloo, NCCL and the stores after the loss of a peer. They name the neighbour in the ring, which is often
# not the rank that failed, so such a failure is never the root cause if there is another one.
_LOST_PEER = re.compile(
    r"connection (was likely )?closed|connection reset|connection refused|broken pipe|socket closed|"
    r"connectfullmesh|failed to recv|sendbytes failed|recvvalue failed|remote process exited|"
    r"ncclremoteerror|ncclsystemerror|nccl communicator was aborted|another rank|peer.{0,40}(gone|lost|failed)|"
    r"timed out waiting \d+ms for (recv|send)|wait timeout|watchdog caught collective operation timeout|"
    r"received errors while waiting for send/recv|timeout caused pair closure|"
    # Aborts: gloo's when ranks reduce tensors of unequal size, NCCL's when a collective does not end.
    r"gloo/transport/tcp/(pair|buffer|unbound_buffer)\.cc:\d+\] op\.|"
    r"watchdog got stuck|heartbeat monitor timed out|flight recorder dump signal|"
    r"dump debug info, due to collective timeout|(nccl|collective) operation timed out|"
    r"watchdog detected operation (timeout|error)|aborting the nccl communicator",
    re.IGNORECASE,
)


UNEQUAL_SIZES = "the ranks called a collective with tensors of unequal size"
"""In place of gloo's text when it aborts a rank, whose connections the others lose then."""
_LIBRARY = re.compile(
    r"gloo|nccl|processgroup|c10d|tcpstore|\.(?:cc|cpp):\d+|dist(?:store|network|backend)error|recvvalue|sendbytes|"
    r"connectfullmesh|timed out waiting \d+ms|connection closed by peer \[|heartbeat monitor|watchdog|flight recorder|"
    r"collective operation timed out",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(
    r"timed out waiting (\d+)ms|wait timeout after (\d+)ms|collective operation timeout(?:.*?Timeout\(ms\)=(\d+))?|"
    r"wait timeout|timed out|got stuck|due to collective timeout|detected operation timeout",
    re.IGNORECASE,
)


def is_lost_peer(message: str) -> bool:
    """Return whether an error message is only about the loss of another rank."""
    return _LOST_PEER.search(message) is not None


def lost_peer_text(message: str) -> str:
    """Return in words what a message of gloo, NCCL or a store says about a lost peer; any other message unchanged.

    Theirs names files of C++ and a neighbour that is often one more victim; it stays in the rank's log.
    """
    if not (_LIBRARY.search(message) and is_lost_peer(message)):
        return message
    if re.search(r"op\.\w+\.length|size doesn't match", message):
        return UNEQUAL_SIZES
    timed_out = _TIMED_OUT.search(message)
    if timed_out is None:
        return "the connection to another rank was lost"
    milliseconds = next((text for text in timed_out.groups() if text), "")
    return "another rank did not answer" + (f" within {int(milliseconds) / 1e3:g} s" if milliseconds else " in time")


def root_cause(failures: Iterable[tuple[int, Failure]]) -> Failure | None:
    """Return the earliest failure that does not follow from another one, else the earliest consequence.

    Tensors of unequal size come before the connections that are lost when a rank aborts because of them.
    """
    weights: Mapping[str, int] = {"lost_peer": 2, "join_timeout": 1, "stopped": 3}

    def order(entry: tuple[int, Failure]) -> tuple[int, bool, int]:
        time, failure = entry
        return weights.get(failure.kind, 0), UNEQUAL_SIZES not in failure.message, time

    ordered = sorted(failures, key=order)
    return ordered[0][1] if ordered else None


def answer_s(stop_grace_s: float, step_s: float) -> float:
    """Return the seconds in which ranks must answer a stop request: the grace, but at least ``STOP_STEPS`` steps."""
    return max(stop_grace_s, STOP_STEPS * step_s)


def describe_stop(update: int | None, saved: str | None, not_kept: str = "") -> str:
    """Return a message with the step at which a training stopped, its checkpoint and its unsaved work."""
    where = "" if update is None else f" at step {update}"
    return f"stopped{where}" + (f", saved {saved}" if saved else "") + (f", but {not_kept}" if not_kept else "")


def exit_code_of(failure: Failure) -> ExitCode:
    """Return the exit code of a failure: 2 for a request that a rank refused, 3 for one that a host refused, else 1."""
    codes = {"request": ExitCode.BAD_REQUEST, "refused": ExitCode.REFUSED}
    return codes.get(failure.kind, ExitCode.FAILED)


def signal_name(number: int) -> str:
    """Return the name of a signal, ``SIGKILL`` for 9; ``signal N`` for a real-time signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
