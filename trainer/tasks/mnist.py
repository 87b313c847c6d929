"""HetSeq's digit recognition: two convolutions and two linear layers on MNIST.

Shapes: B images of 28 × 28 pixels, 10 classes.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.contract.errors import RequestError
from trainer.contract.task_files import idx_file, refuse_unreadable
from trainer.contract.task_options import MnistOptions
from trainer.data.dataset import SizedDataset
from trainer.tasks.classification import Classifier, class_predictions

PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081
"""Mean and standard deviation of the training images' pixels, scaled to 0…1."""
DIGITS = [str(digit) for digit in range(10)]


class Images:
    """Images and their digits."""

    def __init__(self, images: Tensor, digits: Tensor) -> None:
        self.images = images
        """``[N, 28, 28]``, uint8."""
        self.digits = digits
        """``[N]``, int64."""

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self.images[index], self.digits[index]

    def __getitems__(self, indices: Sequence[int], /) -> tuple[Tensor, Tensor]:
        """Return images ``[B, 28, 28]`` and digits ``[B]`` with one gather each."""
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.digits[chosen]


class MnistNet(nn.Module):
    """HetSeq's convolutional network, 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3)
        self.second = nn.Conv2d(32, 64, 3)
        # HetSeq applies Dropout2d to vectors too, where it is the same as Dropout.
        self.map_dropout = nn.Dropout2d(0.25)
        self.hidden = nn.Linear(64 * 12 * 12, 128)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map pixels ``[B, 28, 28]``, uint8, to logits ``[B, 10]``."""
        x = (images.unsqueeze(1).to(self.first.weight.dtype) / 255 - PIXEL_MEAN) / PIXEL_STD
        x = F.relu(self.second(F.relu(self.first(x))))  # [B, 64, 24, 24]
        x = self.map_dropout(F.max_pool2d(x, 2))  # [B, 64, 12, 12]
        x = self.dropout(F.relu(self.hidden(x.flatten(1))))
        logits: Tensor = self.output(x)
        return logits


class MnistTask(Classifier):
    """``--task mnist``: read a digit from an image."""

    Options = MnistOptions
    options: MnistOptions

    def datasets(self) -> Mapping[str, SizedDataset]:
        folder = Path(self.options.data)
        train, test = read_images(folder, "train"), read_images(folder, "t10k")
        splits = {"train": train, "test": test}
        self.weigh_classes(train.digits, DIGITS, source=self.options.data)
        if self.options.valid_subset == "test":
            splits["valid"] = test
        return splits

    def model(self) -> nn.Module:
        return MnistNet()

    def collate(self, samples: Any) -> tuple[Tensor, Tensor]:
        """Return pixels ``[B, 28, 28]`` and digits ``[B]``; pixels stay bytes until they are on the device."""
        if isinstance(samples, tuple):
            return samples
        return torch.stack([image for image, _ in samples]), torch.stack([digit for _, digit in samples])

    def read_inputs(self, path: Path) -> Iterable[Mapping[str, Any]] | None:
        """Return the images of an IDX file as ``pixels``; None for another file, whose lines are JSON."""
        if "idx3-ubyte" not in path.name:
            return None
        return [{"pixels": image} for image in read_idx(path)]

    def predict(self, model: nn.Module, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the digit of each image, and the probability of all ten; ``pixels``: 784 bytes, 0 is black."""
        images = []
        for row in rows:
            image = torch.as_tensor(row["pixels"], dtype=torch.uint8)
            if image.numel() != 28 * 28:
                raise RequestError(f"{getattr(row, 'where', 'a row')}: pixels has {image.numel()} numbers, not 28 × 28")
            images.append(image.reshape(28, 28))
        logits = model(torch.stack(images).to(next(model.parameters()).device))
        return class_predictions(logits, DIGITS, "digit")


def read_images(folder: Path, split: str) -> Images:
    """Read the images and digits of ``train`` or ``t10k``."""
    image_path = idx_file(folder, f"{split}-images-idx3-ubyte")
    digit_path = idx_file(folder, f"{split}-labels-idx1-ubyte")
    images, digits = read_idx(image_path), read_idx(digit_path)
    if images.dim() != 3 or images.shape[1:] != (28, 28):
        raise RequestError(f"{image_path} holds {tuple(images.shape)}, but must hold images of 28 × 28")
    if digits.shape != images.shape[:1]:
        raise RequestError(f"{digit_path} holds {tuple(digits.shape)} labels, but {image_path} {len(images)} images")
    if not len(digits):
        raise RequestError(f"{image_path} holds no image")
    if int(digits.max()) > 9:
        raise RequestError(f"{digit_path} holds the label {int(digits.max())}, but digits end at 9")
    return Images(images, digits.long())


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of bytes, compressed or not: 0, 0, type, dimensions, then each size as big-endian 32 bits."""
    with refuse_unreadable(path):
        content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, zlib.error, OSError) as error:
            raise RequestError(f"{path} is damaged: {error}") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise RequestError(f"{path} is not an IDX file of bytes")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise RequestError(f"{path} is damaged: it ends inside its header")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    expected = math.prod(shape)
    if len(content) - start != expected:
        raise RequestError(f"{path} is damaged: {len(content) - start} bytes of data instead of {expected}")
    if not expected:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)
