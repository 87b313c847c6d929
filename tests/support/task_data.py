"""Data files of the built-in tasks."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

TEXT = "".join(f"{n} green bottles hang on the wall, {n} green bottles.\n" for n in range(300))


def write_data(folder: Path, task: str) -> dict[str, Any]:
    """Write a small data set from which a task can learn; return the task's options."""
    if task == "docnn":
        for name, count in (("train", 41), ("dev", 9)):
            rows = [f"this film is {('bad', 'good')[n % 2]} in {n % 7} ways\t{n % 2}\n" for n in range(count)]
            (folder / f"{name}.tsv").write_text("".join(rows))
        return {"train_path": str(folder / "train.tsv"), "eval_path": str(folder / "dev.tsv")}
    if task == "mnist":
        for split, count in (("train", 43), ("t10k", 11)):
            digits = bytes(n % 10 for n in range(count))
            images = b"".join(bytes([25 * digit]) * 784 for digit in digits)
            for name, shape, content in (
                (f"{split}-images-idx3-ubyte.gz", (count, 28, 28), images),
                (f"{split}-labels-idx1-ubyte.gz", (count,), digits),
            ):
                header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
                (folder / name).write_bytes(gzip.compress(header + content))
        return {"data": str(folder)}
    (folder / "text.txt").write_text(TEXT)
    if task == "lm":
        return {"data": str(folder / "text.txt"), "context": 32, "dim": 32, "layers": 1, "heads": 2, "sample_bytes": 9}
    return {"data": str(folder / "text.txt"), "vocab_size": 128, "sequence_length": 32, "valid_fraction": 0.1}
