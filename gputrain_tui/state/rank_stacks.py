"""Stacks of several ranks, equal ones together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.contract.record import CodeFrame, RankStacks, ThreadStack

WAITS = {
    "trainer/telemetry/comm_hook.py": "synchronising gradients",
    "torch/distributed/distributed_c10d.py": "in {}",
    "torch/utils/data/dataloader.py": "waiting for a batch of the DataLoader",
    "torch/cuda/__init__.py": "waiting for the GPU",
}
"""File of a library to what a thread in it does; ``{}`` is a public function of the file."""
_FOLDER = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+)/")


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads are at the same place, or that gave the same reason for no answer."""

    ranks: list[int]
    """Ascending."""
    threads: list[ThreadStack]
    """Stacks of the first of these ranks, the main thread first; empty without an answer."""
    problem: str
    """Why there is no stack, or what the process was found to be; empty for a plain answer."""

    @property
    def line(self) -> str:
        """Where the main thread is, the innermost line of the user's code first; empty without an answer."""
        frames = self.threads[0].frames if self.threads else []
        own = next((frame for frame in frames if frame.user), None)
        texts = [waits_for(frames), frame_text(own) if own else "", frame_text(frames[0]) if frames and not own else ""]
        return ", ".join(text for text in texts if text)


def frame_text(frame: CodeFrame) -> str:
    """Return a call in a line, such as ``train.py:12 in augment``; a library's file without its folder."""
    return f"{_FOLDER.sub('', frame.file)}:{frame.line} in {frame.function}"


def waits_for(frames: Iterable[CodeFrame]) -> str:
    """Return what a thread waits for by its innermost calls outside of the user's code; empty if that is not known."""
    for frame in frames:
        if frame.user:
            return ""
        for file, text in WAITS.items():
            if frame.file.endswith(file) and not frame.function.startswith("_" if "{}" in text else "\0"):
                return text.format(frame.function)
    return ""


def group_stacks(answers: Iterable[RankStacks]) -> list[StackGroup]:
    """Return the groups of equal answers, those with the fewest ranks first: they are where a run hangs.

    Ranks are at the same place if their main threads are in the same functions and at the same lines of the user's
    code; the lines of libraries differ between ranks that wait in the same collective.
    """
    groups: dict[object, list[RankStacks]] = {}
    for answer in sorted(answers, key=lambda answer: answer.rank):
        frames = answer.threads[0].frames if answer.threads else []
        key = answer.problem, tuple((each.file, each.function, each.line if each.user else 0) for each in frames)
        groups.setdefault(key, []).append(answer)
    found = [StackGroup([each.rank for each in of], of[0].threads, of[0].problem) for of in groups.values()]
    return sorted(found, key=lambda group: (len(group.ranks), group.ranks))
