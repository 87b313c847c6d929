"""The options of ``[report]``: TensorBoard, Weights & Biases and a command at the end of a run."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trainer.contract.schema import option_meta


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of ``[report]``."""

    tensorboard: (
        Annotated[
            str,
            option_meta(
                "Report",
                "write TensorBoard's event files while the run goes on: true for a folder in the run directory, or a "
                "folder that gets one for each run",
                or_kind="bool",
                min_length=1,
            ),
        ]
        | None
    ) = None
    wandb: (
        Annotated[
            str, option_meta("Report", "project of Weights & Biases to log to while the run goes on", min_length=1)
        ]
        | None
    ) = None
    on_end: (
        Annotated[
            str,
            option_meta(
                "Report", "shell command once the run has ended, with GPUTRAIN_RUN_STATUS and others", min_length=1
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.tensorboard == "false":
            msgspec.structs.force_setattr(self, "tensorboard", None)
