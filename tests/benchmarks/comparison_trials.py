"""Trials of ``gputrain compare``: how often it is right about equal runs, and about a slower forward pass.

``python tests/benchmarks/comparison_trials.py FOLDER --rounds 10`` does rounds of three runs, one after the other: two
equal ones, and one whose steps compute about a tenth more, all of it in the forward pass. It answers for the machine
as it is then, quiet or beside other work. ``--rounds 0`` counts the runs that FOLDER has. Equal runs are compared both
ways. Wrong is ``exceeded`` of equal runs, and ``kept`` of the slower one at a limit of 5 %: the exit code is then 1.
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
EXTRA_LAYERS = 3
"""Forward passes of a layer more: a step has about 30, as a backward pass costs as much as two."""


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
                for layer in self.layers[:extra]:
                    layer(x).tanh()
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
    (made,) = sorted((folder / "runs").glob(f"*-{name}"))
    return made.name


def gputrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gputrain_tui", *arguments], capture_output=True, text=True, check=False
    )


def verdict(before: str, now: str, condition: str) -> str:
    """Return ``kept``, ``undecided``, ``exceeded`` or ``exceeded by PHASE``, by the exit code and the words."""
    done = gputrain("compare", before, now, "--fail-on", condition, "--json")
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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--extra", type=int, default=0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.extra, options.steps)
        return
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["GPUTRAIN_HOME"] = str(folder)
    first = len(list((folder / "runs").glob("*-slow*")))
    for number in range(first, first + options.rounds):
        for name, extra in (("one", 0), ("equal", 0), ("slow", EXTRA_LAYERS)):
            print(run(folder, f"{name}{number}", extra, options.steps), flush=True)
    by_name = {path.name.split("-")[-1]: path.name for path in (folder / "runs").iterdir()}
    wrong = 0
    for limit in (5, 25):
        equal, slow = Counter[str](), Counter[str]()
        for number in range(first + options.rounds):
            one, other, slower = (by_name[f"{name}{number}"] for name in ("one", "equal", "slow"))
            equal.update(verdict(*pair, f"step_ms>+{limit}%") for pair in ((one, other), (other, one)))
            slow[verdict(one, slower, f"step_ms>+{limit}%")] += 1
        print(f"limit {limit} %: equal {dict(equal)}, slower {dict(slow)}", flush=True)
        wrong += sum(count for name, count in equal.items() if name.startswith("exceeded"))
        wrong += slow["kept"] if limit == 5 else 0
    raise SystemExit(min(wrong, 1))


if __name__ == "__main__":
    main()
