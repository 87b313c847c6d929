from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from record_reading import events_of, numbers_of, sample

from trainer.contract.record import (
    Lost,
    encode_event,
)

ROOT = Path(__file__).parents[2]


FULL_DISK = """
import os, resource, sys, threading, time
from pathlib import Path
from trainer.contract.record import EventWriter, Sample

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

refusals, real_write = threading.Semaphore(0), os.write

def write(fd, data):
    try:
        return real_write(fd, data)
    except OSError:
        refusals.release()
        raise

os.write = write

def wait_until_full():
    # At the second refusal the writer knows of the first. The file ends at the limit then, in the middle of a line.
    for _ in range(2):
        assert refusals.acquire(timeout=300)
    assert path.stat().st_size == 10_007

path = Path(sys.argv[1])
writer = EventWriter(path, rank=4)
for number in range(100):
    writer.write(Sample(time=0.0, step=number, text=""))
assert writer.flush()
limit(10_007)
"""


def on_a_full_disk(path: Path, program: str) -> list[str]:
    """Run a program whose file may not grow beyond 10,007 bytes; a limit acts as a full disk does."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK + program, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_events_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "0.ndjson"
    [flushed, lost] = on_a_full_disk(
        path,
        """
for number in range(100, 1000):
    writer.write(Sample(time=0.0, step=number, text=""))
wait_until_full()
print(writer.flush(0.2))
limit(resource.RLIM_INFINITY)
writer.close()
print(writer.lost)
""",
    )
    assert (flushed, lost) == ("False", "0")
    assert path.read_bytes() == b"".join(encode_event(sample(number)) for number in range(1000))


def test_events_over_the_writers_capacity_are_counted_where_they_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "0.ndjson"
    on_a_full_disk(
        path,
        """
writer.capacity = 300
for number in range(100, 350):
    writer.write(Sample(time=0.0, step=number, text=""))
wait_until_full()
for number in range(350, 1000):
    writer.write(Sample(time=0.0, step=number, text=""))
assert writer.lost > 300, writer.lost
limit(resource.RLIM_INFINITY)
assert writer.flush()
for number in range(1000, 1010):
    writer.write(Sample(time=0.0, step=number, text=""))
writer.close()
assert writer.lost == 0
""",
    )
    events = events_of(path)
    assert path.read_bytes().count(b"\n") == len(events), "a line is torn"
    [gap] = [index for index, event in enumerate(events) if isinstance(event, Lost)]
    lost = events[gap]
    assert isinstance(lost, Lost)
    before, after = numbers_of(events[:gap]), numbers_of(events[gap:])
    assert before == list(range(len(before)))
    assert after == list(range(1000, 1010))
    assert lost.events == 1000 - len(before)
    assert lost.rank == 4
    assert lost.message == "File too large"


def test_a_disk_that_stays_full_does_not_hold_the_end(tmp_path: Path) -> None:
    path = tmp_path / "0.ndjson"
    [lost, seconds] = on_a_full_disk(
        path,
        """
for number in range(100, 1000):
    writer.write(Sample(time=0.0, step=number, text=""))
started = time.monotonic()
writer.close()
print(writer.lost, time.monotonic() - started)
""",
    )
    assert int(lost) == 1000 - len(events_of(path))
    assert float(seconds) < 30, "it would have waited for ever"
