from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.agent.log_tail import error_line, last_error


class Broken(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        if index == 2:
            try:
                return torch.zeros(int("x"))
            except ValueError as error:
                raise OSError(5, "Input/output error", "shard-7.bin\nand more") from error
        return torch.zeros(1)


def caught(num_workers: int) -> BaseException:
    with pytest.raises(OSError, match="Input/output error") as raised:
        list(DataLoader(Broken(), num_workers=num_workers))
    return raised.value


def test_an_error_of_a_data_loading_process_is_told_as_that_process_had_it() -> None:
    here = error_line(caught(0))
    assert here.startswith("OSError: [Errno 5] Input/output error: 'shard-7.bin")
    assert error_line(caught(1)) == f"{here} (in DataLoader worker process 0)"


def test_a_log_that_ends_with_such_an_error_names_it_too(tmp_path: Path) -> None:
    error = caught(1)
    log = tmp_path / "log"
    log.write_text(f"Traceback (most recent call last):\n  File x, line 1\nOSError: {error}\n")
    assert last_error(log).startswith("OSError: [Errno 5]")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n no more data\nreally"), "ValueError:  no more data"),
        (ValueError(), "ValueError"),
        (RuntimeError("Caught nothing"), "RuntimeError: Caught nothing"),
        (RuntimeError("Caught fish in a net."), "RuntimeError: Caught fish in a net."),
    ],
)
def test_another_error_is_told_by_its_class_and_first_line(error: BaseException, line: str) -> None:
    assert error_line(error) == line
