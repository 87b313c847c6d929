"""Shares of the global batch that another run has recorded, for ``shares_from``; torch-free: preflight reads them."""

from __future__ import annotations

import os

from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir, ShareChange, decode_events
from trainer.contract.record.regular_file import open_regular


def recorded_shares(folder: str, *, ranks: int, global_batch_size: int) -> dict[int, list[int]]:
    """Return the shares of a run by the first step that had them.

    Raises:
        RequestError: the record cannot be read, has no balanced shares, or those of other ranks or another batch.
    """
    path = RunDir(folder).rank_events(0)
    try:
        # By lines: most are steps, perhaps a great many.
        with os.fdopen(open_regular(path), "rb") as file:
            events = decode_events(b"".join(line for line in file if b'"type":"shares"' in line))
    except OSError as error:
        raise RequestError(f"{folder} is no run directory: {path} cannot be read: {error.strerror}") from None
    changes = [event for event in events if isinstance(event, ShareChange)]
    if not changes:
        raise RequestError(f"{folder} has no balanced shares in its record")
    found: dict[int, list[int]] = {}
    for change in changes:
        if len(change.shares) != ranks or sum(change.shares) != global_batch_size:
            raise RequestError(
                f"the shares of {folder} are {', '.join(map(str, change.shares))} samples of {len(change.shares)} "
                f"ranks, but this run divides {global_batch_size} among {ranks}"
            )
        if change.cause in ("start", "resumed"):  # steps after it were made again
            found = {step: each for step, each in found.items() if step < change.step}
        found[change.step] = change.shares
    return found
