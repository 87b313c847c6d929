"""A user's script without trainer.watch; rank 1 hangs, or leaves with exit code 0, while rank 0 goes on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    for step in range(1_000_000):
        dist.all_reduce(torch.ones(1))
        if step == 20 and dist.get_rank() == 1:
            if sys.argv[1] == "hang":
                Path(os.environ["GPUTRAIN_RUN"], "hangs").touch()
                time.sleep(600)
            sys.exit(0)


if __name__ == "__main__":
    main()
