"""HetSeq's MNIST: its network, the IDX files it is read from, and damaged ones."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.contract.errors import RequestError
from trainer.contract.task_options import MnistOptions
from trainer.tasks.mnist import MnistNet, MnistTask, read_idx

MNIST = Path(os.environ.get("GPUTRAIN_DATA", Path(__file__).parents[4] / "shared" / "data")) / "mnist"


def idx(*shape: int) -> bytes:
    size = 1
    for part in shape:
        size *= part
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(n % 10 for n in range(size))


def write_images(folder: Path, *, packed: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 30), ("t10k", 10)):
        for name, content in (
            (f"{split}-images-idx3-ubyte", idx(count, 28, 28)),
            (f"{split}-labels-idx1-ubyte", idx(count)),
        ):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
    return folder


def test_the_network_is_the_one_of_hetseq() -> None:
    assert sum(p.numel() for p in MnistNet().parameters()) == 1_199_882


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", ["", "raw", "MNIST/raw"])
def test_files_are_read_compressed_or_not_wherever_a_download_left_them(
    tmp_path: Path, packed: bool, below: str
) -> None:
    write_images(tmp_path / below, packed=packed)
    task = MnistTask(MnistOptions(data=str(tmp_path)))
    splits = task.datasets()
    assert {split: len(data) for split, data in splits.items()} == {"train": 30, "test": 10, "valid": 10}
    image, digit = splits["train"][3]
    assert image.shape == (28, 28)
    assert image[0, :4].tolist() == [2, 3, 4, 5]  # the fourth image starts at byte 3 * 784
    assert int(digit) == 3
    whole = task.collate(splits["train"].__getitems__([3, 5]))  # type: ignore[attr-defined]
    singly = task.collate([splits["train"][3], splits["train"][5]])
    assert all(torch.equal(one, other) for one, other in zip(whole, singly, strict=True))
    total, count, sums = task.loss(task.model(), whole)
    assert count == 2
    assert total.isfinite()
    assert 0 <= int(sums["accuracy"]) <= 2


def test_validation_on_the_test_images_can_be_refused(tmp_path: Path) -> None:
    write_images(tmp_path, packed=True)
    assert set(MnistTask(MnistOptions(data=str(tmp_path), valid_subset="none")).datasets()) == {"train", "test"}


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"MNIST is not in {MNIST}; GPUTRAIN_DATA names the folder above it")
def test_the_real_images_have_the_mean_and_deviation_that_they_are_normalised_with() -> None:
    train = MnistTask(MnistOptions(data=str(MNIST))).datasets()["train"]
    images, digits = train.__getitems__(list(range(60_000)))  # type: ignore[attr-defined]
    pixels = images.float() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert pixels.std().item() == pytest.approx(0.3081, abs=1e-4)
    assert digits[:5].tolist() == [5, 0, 4, 1, 9]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda good: good[:-3], "27 bytes of data instead of 30"),
        (lambda good: good[:6], "ends inside its header"),
        (lambda good: b"", "is not an IDX file"),
        (lambda good: b"<html>" + good, "is not an IDX file"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "labels"
    path.write_bytes(damage(idx(30)))
    with pytest.raises(RequestError, match=message):
        read_idx(path)


def test_a_truncated_archive_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx(30))[:-9])
    with pytest.raises(RequestError, match=r"labels\.gz is damaged"):
        read_idx(path)


def test_files_that_do_not_fit_each_other_are_one_line(tmp_path: Path) -> None:
    write_images(tmp_path, packed=False)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(9))
    with pytest.raises(RequestError, match=r"holds \(9,\) labels, but .* 10 images"):
        MnistTask(MnistOptions(data=str(tmp_path))).datasets()


@pytest.mark.parametrize(
    ("folder", "message"),
    [("absent", "absent does not exist"), ("file", "but must be the folder"), ("", "lacks train")],
)
def test_a_missing_folder_or_file_is_one_line(tmp_path: Path, folder: str, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=message):
        MnistTask(MnistOptions(data=str(tmp_path / folder))).datasets()
