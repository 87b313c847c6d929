"""Trials of ``gputrain compare``: how often it is right about equal runs, and about a slower forward pass.

``python tests/benchmarks/comparison_trials.py FOLDER --trials 10`` does trials of three runs, one after the other: two
equal ones, and one whose steps compute more, by about a tenth for 3 ``--extra-layers`` and by three quarters for 30,
all of it in the forward pass. It answers for the machine as it is then, quiet or beside other work. With ``--rounds
5``, each of the three is run five times in a trial, in turns, and compared so. Equal runs are compared both ways. Wrong
is ``exceeded`` of equal runs, and ``kept`` of the slower one: the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

LAYERS, WIDTH, BATCH = 10, 256, 128
LIMITS = (5, 25)
"""Percent."""


def train(extra: int, steps: int) -> None:
    """Train as one rank of a script that knows nothing of gputrain."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for number in range(extra):
                    self.layers[number % LAYERS](x).tanh()
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().mean()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (batch,) in DataLoader(TensorDataset(torch.randn(steps * BATCH, WIDTH)), batch_size=BATCH):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    dist.destroy_process_group()


def run(folder: Path, name: str, extra: int, steps: int) -> str:
    """Train in a run of its own and return its id."""
    recipe = folder / f"{name}.toml"
    recipe.write_text(
        f'name = "{name}"\n[[cluster.nodes]]\ncpu_ranks = 2\n[train]\n'
        f'script = "{Path(__file__).resolve()}"\nargs = ["--extra", "{extra}", "--steps", "{steps}"]\n'
    )
    done = gputrain("run", str(recipe), "--json")
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return max((path.name for path in (folder / "runs").glob(f"*-{name}*")), key=lambda each: each[:15])


def gputrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gputrain_tui", *arguments], capture_output=True, text=True, check=False
    )


def verdict(before: str, now: str, condition: str, *how: str) -> str:
    """Return ``kept``, ``undecided``, ``exceeded`` or ``exceeded by PHASE``, by the exit code and the words."""
    done = gputrain("compare", before, now, "--fail-on", condition, "--json", *how)
    (limit,) = json.loads(done.stdout)["limits"]
    assert done.returncode == (1 if limit["exceeded"] else 0), done.stderr
    print(f"  {now}: {limit['text']}", flush=True)
    if not limit["exceeded"]:
        return "kept" if limit["decided"] else "undecided"
    _, _, phase = limit["text"].partition("most by ")
    return f"exceeded by {phase.split(' ')[0]}" if phase else "exceeded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--extra-layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--extra", type=int, default=0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.extra, options.steps)
        return
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["GPUTRAIN_HOME"] = str(folder)
    found: dict[str, Counter[str]] = {f"{what}, {limit} %": Counter() for limit in LIMITS for what in ("equal", "slow")}
    for _ in range(options.trials):
        for number in range(max(1, options.rounds)):
            kinds = [("one", 0), ("equal", 0), ("slow", options.extra_layers)]
            # The order turns around, as the second run of a pair may find the machine warmer.
            ids = {name: run(folder, name, extra, options.steps) for name, extra in kinds[:: -1 if number % 2 else 1]}
        names, how = ids, list[str]()
        if options.rounds:
            names, how = {name: name for name in ids}, ["--rounds", str(options.rounds)]
        for limit in LIMITS:
            condition = f"step_ms>+{limit}%"
            for before, now in (("one", "equal"), ("equal", "one"), ("one", "slow")):
                what = "slow" if now == "slow" else "equal"
                found[f"{what}, {limit} %"][verdict(names[before], names[now], condition, *how)] += 1
        print({name: dict(each) for name, each in found.items()}, flush=True)
    wrong = sum(
        count
        for name, each in found.items()
        for result, count in each.items()
        if (result.startswith("exceeded") if name.startswith("equal") else name == "slow, 5 %" and result == "kept")
    )
    raise SystemExit(min(wrong, 1))


if __name__ == "__main__":
    main()
