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
                "write TensorBoard event files during the run: true for a folder in the run directory, or a folder "
                "that gets a subfolder for each run",
                or_kind="bool",
                min_length=1,
            ),
        ]
        | None
    ) = None
    wandb: (
        Annotated[str, option_meta("Report", "Weights & Biases project to log to during the run", min_length=1)] | None
    ) = None
    on_end: (
        Annotated[
            str,
            option_meta(
                "Report", "shell command to run at the end, with GPUTRAIN_RUN_STATUS and others set", min_length=1
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.tensorboard == "false":
            msgspec.structs.force_setattr(self, "tensorboard", None)
