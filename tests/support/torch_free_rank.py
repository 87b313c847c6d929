"""Script of a rank without torch: records a step now and then, as many as its argument says, or until a signal ends it.

For tests of what is around a training, such as queues, hosts, connections and outputs: to import torch on every host
takes most of the processor time of a small run.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

from trainer.contract.record import RunDir, Step, encode_event

PAUSE_S = 0.02


def main() -> None:
    rank = int(os.environ["RANK"])
    record = RunDir(Path(os.environ["GPUTRAIN_RUN_DIR"])).rank_events(rank)
    for number in range(1, 1 + int(sys.argv[1])) if len(sys.argv) > 1 else itertools.count(1):
        event = Step(time=time.time(), rank=rank, step=number, epoch=1, steps=1, samples=4, loss=2.0)
        with record.open("ab", buffering=0) as file:
            file.write(encode_event(event))
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
