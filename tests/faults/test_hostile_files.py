"""Files at the paths that a run writes, left there by others: none of them is changed, and no wait is for ever."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from trainer.checkpoint.folder_lock import LOCK, FolderLock
from trainer.contract.errors import RequestError
from trainer.contract.record import write_atomically
from trainer.host.gpu_claims import GpuTakenError, claim_gpus, claims
from trainer.host.temporary_folder import delete_temporary_folders, make_temporary_folder

PRECIOUS = b"a user's own text\n"
NOBODY = 65534
STATES = ("link", "hard link", "dangling link", "link to a folder", "fifo", "folder", "text", "read-only")


def place(state: str, path: Path, precious: Path) -> None:
    """Put something that is not ours at a path."""
    match state:
        case "link":
            path.symlink_to(precious)
        case "hard link":
            path.hardlink_to(precious)
        case "dangling link":
            path.symlink_to(precious.with_name("made-through-a-link"))
        case "link to a folder":
            path.symlink_to(precious.parent)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "text":
            path.write_bytes(PRECIOUS)
        case "read-only":
            path.write_bytes(PRECIOUS)
            path.chmod(0o444)


def seen(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return kind and content of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        found[str(path.relative_to(folder))] = (stat.S_IFMT(mode), path.read_bytes() if stat.S_ISREG(mode) else b"")
    return found


@contextmanager
def hostile_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        (folder / "precious").write_bytes(PRECIOUS)
        (folder / "here").mkdir()
        before = signal.signal(signal.SIGALRM, _blocks)
        signal.alarm(20)
        try:
            yield folder
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


def _blocks(*_: object) -> None:
    raise TimeoutError("it blocks, as on a fifo without a writer")


@settings(max_examples=16, deadline=None, derandomize=True, database=None)
@given(state=st.sampled_from(STATES))
def test_a_lock_of_a_folder_of_checkpoints_never_touches_what_is_not_one(state: str) -> None:
    with hostile_folder() as folder:
        place(state, folder / "here" / LOCK, folder / "precious")
        before = seen(folder)
        with pytest.raises(RequestError) as raised:
            FolderLock(folder / "here", run_id="20261124-mine")
        assert str(raised.value).startswith(f"{folder / 'here' / LOCK} ")
        assert "delete it, or choose another folder" in str(raised.value)
        assert seen(folder) == before


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b'{"run":"old","pid":1,"host":"here"}', b'{"run":"cut o'])
def test_a_lock_that_a_training_has_left_is_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    FolderLock(tmp_path, run_id="mine").release()
    assert b'"mine"' in (tmp_path / LOCK).read_bytes()


@settings(max_examples=32, deadline=None, derandomize=True, database=None)
@given(state=st.sampled_from(STATES), other=st.sampled_from(STATES))
def test_an_atomic_write_touches_only_its_own_file(state: str, other: str) -> None:
    with hostile_folder() as folder:
        path, precious = folder / "here" / "status.json", folder / "precious"
        place(state, path.with_name(f".{path.name}.{os.getpid()}.tmp"), precious)
        if other not in ("folder",):
            place(other, path, precious)
        before = seen(folder)
        write_atomically(path, b"{}")
        assert seen(folder) == before | {"here/status.json": (stat.S_IFREG, b"{}")}


def test_an_atomic_write_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[bytes, bool]] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").read_bytes(), (tmp_path / "file").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    write_atomically(tmp_path / "file", b"whole")
    assert synced == [(b"whole", False)]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- other users ----------------------------------------------------------------------------------------------------


def as_nobody(function: Callable[[], str]) -> str:
    """Call a function in a process of another user, and return what it returns."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            os.write(write, function().encode())
        except BaseException as error:  # noqa: BLE001 - shown by the test
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root")


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o444, 0o666])
def test_a_lock_of_another_user_is_refused_with_its_owner(tmp_path: Path, mode: int) -> None:
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        folder.chmod(0o777)
        FolderLock(folder, run_id="of-root").release()
        (folder / LOCK).chmod(mode)

        def take() -> str:
            FolderLock(folder, run_id="of-nobody").release()
            return "taken"

        expected = f"RequestError: {folder / LOCK} belongs to root and cannot be written: delete it, or choose another"
        assert as_nobody(take).startswith("taken" if mode == 0o666 else expected)


@needs_root
@settings(max_examples=24, deadline=None, derandomize=True, database=None)
@given(
    mode=st.sampled_from([0o700, 0o755, 0o1777, 0o000, None]),
    ours=st.booleans(),
    run=st.text(max_size=200),
    shared=st.booleans(),
)
def test_a_gpu_of_any_user_s_run_is_refused_whatever_is_in_the_temporary_folder(
    mode: int | None, ours: bool, run: str, shared: bool
) -> None:
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named) / "claims"
        if mode is not None:
            folder.mkdir()
            os.chown(folder, 0 if ours else NOBODY, -1)
            folder.chmod(mode)
        environ = {"GPUTRAIN_GPU_CLAIMS": str(folder)}

        def claim() -> str:
            with claim_gpus(["GPU-1"], "second", shared=shared, environ=environ):
                return "claimed"

        with claim_gpus(["GPU-1", "GPU-2"], run, shared=False, environ=environ):
            refused = as_nobody(claim)
            held = as_nobody(lambda: " ".join(claims(["GPU-1", "GPU-2", "GPU-3"], environ)))
        assert refused == "claimed" if shared else refused.startswith("GpuTakenError: GPU GPU-1 is taken by ")
        assert f"(pid {os.getpid()} of root)" in refused or shared
        assert held == "GPU-1 GPU-2"
        assert as_nobody(claim) == "claimed"
        assert claims(["GPU-1"], environ) == {}


def test_a_run_that_shares_a_gpu_keeps_it_from_one_that_does_not() -> None:
    environ = {"GPUTRAIN_GPU_CLAIMS": f"test-{os.getpid()}"}
    with claim_gpus(["GPU-1"], "first", shared=True, environ=environ):
        with claim_gpus(["GPU-1"], "second", shared=True, environ=environ):
            pass
        with pytest.raises(GpuTakenError, match="GPU GPU-1 is taken by run first"):
            claim_gpus(["GPU-1"], "third", shared=False, environ=environ).__enter__()
    assert claims(["GPU-1"], environ) == {}


@needs_root
def test_folders_of_another_user_with_the_name_of_a_temporary_folder_are_left(tmp_path: Path) -> None:
    mine = make_temporary_folder(tmp_path / "run", 0, tmp_path)
    theirs = mine.with_name(f"{mine.name[:-4]}0000")
    if theirs == mine:
        theirs = mine.with_name(f"{mine.name[:-4]}0001")
    theirs.mkdir()
    os.chown(theirs, NOBODY, -1)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    delete_temporary_folders(tmp_path / "run", [0], tmp_path)
    assert list(tmp_path.iterdir()) == [theirs]
