"""Scripts of other projects on CPU ranks: whether a late rank is named with its phase, and no rank of an even run.

``python tests/benchmarks/other_projects.py FOLDER [--times N] [--even-steps N] [--only REGEX]`` prints a table;
with ``--bits N`` another one: whether the parameters of N steps are equal bit for bit without gputrain (torchrun).
FOLDER holds the projects, as their repositories are checked out: ``examples`` (PyTorch), ``nanoGPT``, ``nanochat``.
Nothing is fetched. ``accelerate``, ``torchvision`` and what nanochat imports must be installed beside gputrain.

Each run is one of ``gputrain run``, of a copy of the project in which only the lines of ``Project.edits`` differ: they
set the number of steps, take CPUs in place of GPUs, and make models small. A rank is made late from outside, by a
``sitecustomize`` that sleeps in the forward pass of the outermost trained module, before its first submodule.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.history.run_reader import RunReader
from trainer.contract.record import Finding, RunDir, Step
from trainer.host.ports import free_port

HERE = Path(__file__).resolve().parent
ONSET = 15
"""Forward passes of the late rank before the first that is late: as many steps are even."""
SOON = 20
"""Steps after which it must have been named, of late ones."""
STEPS = 36
LATE_RANK = 1
LATE_MS = 200.0
LIMIT_S = 900.0
"""No run is waited for longer."""
SITE = '''
"""Makes a rank late (LATE: its rank, the passes before, the least and the most milliseconds), or writes a checksum of
the parameters before each step into a file of BITS for each rank."""
import hashlib, os, random, sys, time

class Late:
    def __init__(self, rank, onset, least_ms, most_ms):
        self.rank, self.onset, self.least_ms, self.most_ms = rank, int(onset), float(least_ms), float(most_ms)
        self.passes = self.depth = 0
        self.begins = False
        self.random = random.Random(1)

    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn.parallel":  # torch.nn.modules is there
            sys.meta_path.remove(self)
            from torch.nn.modules import module
            module.register_module_forward_pre_hook(self.before)
            module.register_module_forward_hook(self.after, always_call=True)

    def before(self, module, args):
        import torch
        self.depth += 1
        if self.depth == 1:
            trains = module.training and torch.is_grad_enabled()
            self.begins = trains and any(parameter.requires_grad for parameter in module.parameters())
        elif self.begins and self.is_late():
            self.begins = False
            self.passes += 1
            if self.passes > self.onset:
                time.sleep(self.random.uniform(self.least_ms, self.most_ms) / 1e3)

    def after(self, module, args, output):
        self.depth -= 1

    def is_late(self):
        import torch.distributed as dist
        return dist.is_initialized() and dist.get_rank() == int(self.rank)

class Bits(Late):
    def __init__(self, folder):
        super().__init__(-1, 0, 0, 0)
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn.parallel":
            import torch
            torch.default_generator.manual_seed(1)  # what the script does not seed is another in each process
        super().find_spec(name, path, target)

    def before(self, module, args):
        super().before(module, args)
        if self.depth == 1 and self.begins:
            import torch.distributed as dist
            checksum = hashlib.sha256()
            for parameter in module.parameters():
                local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
                checksum.update(local.detach().float().contiguous().numpy())
            with open(f"{self.folder}/{dist.get_rank()}", "a") as file:
                print(checksum.hexdigest(), file=file)

if "LATE" in os.environ:
    sys.meta_path.insert(0, Late(*os.environ["LATE"].split(":")))
if "BITS" in os.environ:
    sys.meta_path.insert(0, Bits(os.environ["BITS"]))
'''

Edits = Sequence[tuple[str, str]]
Printed = Callable[[str, Sequence[float]], tuple[int, int]]
"""From what rank 0 printed and its recorded losses: how many printed losses are equal, and how many there are."""


def by_step(pattern: str, form: str, log: str, losses: Sequence[float], *, first: int = 0) -> tuple[int, int]:
    """Compare the losses that a script prints with the number of their step.

    ``first`` is the number that it prints for the first step.
    """
    printed = [(int(number) - first, loss) for number, loss in re.findall(pattern, log)]
    known = [(step, loss) for step, loss in printed if 0 <= step < len(losses)]
    return sum(_is_equal(losses[step], form, loss) for step, loss in known), len(known)


def _is_equal(loss: float, form: str, printed: str) -> bool:
    """Whether a script has printed a recorded loss: single ones of an event of several steps have seven digits."""
    return format(loss, form) == printed or math.isclose(loss, float(printed), rel_tol=6e-7)


def smoothed(log: str, losses: Sequence[float]) -> tuple[int, int]:
    """Compare the moving averages that nanochat prints; where an event covers several steps, losses have 6 decimals."""
    total, expected = 0.0, []
    for number, loss in enumerate(losses, 1):
        total = 0.9 * total + (1 - 0.9) * loss
        expected.append(total / (1 - 0.9**number))
    printed = re.findall(r"^step (\d+)/.* loss: (\S+) ", log, re.MULTILINE)
    known = [(expected[int(step)], float(loss)) for step, loss in printed if int(step) < len(expected)]
    return sum(math.isclose(ours, loss, abs_tol=2e-6) for ours, loss in known), len(printed)


@dataclass(frozen=True, kw_only=True)
class Project:
    """A script of a project, and how it is run here. ``{steps}`` stands for the number of steps in edits and words."""

    name: str
    folder: str
    """Within the folder of projects; empty for a script of our own, in a project's style."""
    script: str
    args: str = ""
    ranks: int = 2
    edits: Mapping[str, Edits] = field(default_factory=dict)
    """By file, texts and their replacements, each of which must be there."""
    module: bool = False
    starts_ranks: bool = False
    printed: Printed | None = None
    """None: it prints no loss."""
    env: Mapping[str, str] = field(default_factory=dict)
    late_ms: tuple[float, float] = (LATE_MS, LATE_MS)
    """Least and most of each step."""
    onset: int = ONSET
    soon: int = SOON
    steps: int = STEPS


CPU_TORCH = (("return has_gpu and gpu_count >= min_gpus", "return True"),)
CPU_MESH = ("torch.accelerator.current_accelerator().type", '"cpu"')
TUTORIAL = Project(
    name="ddp-tutorial",
    folder="examples/distributed/ddp-tutorial-series",
    script="multigpu_torchrun.py",
    args="1 1000",
    edits={
        "multigpu_torchrun.py": (
            ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "pass"),
            ('"nccl"', '"gloo"'),
            ('self.gpu_id = int(os.environ["LOCAL_RANK"])', 'self.gpu_id = "cpu"'),
            (", device_ids=[self.gpu_id]", ""),
            ("MyTrainDataset(2048)", "MyTrainDataset({steps} * 32 * 2)"),
        )
    },
)
PROJECTS = (
    TUTORIAL,
    replace(
        TUTORIAL,
        name="ddp-tutorial, late by 0 to 400 ms from the start",
        late_ms=(0.0, 400.0),
        onset=0,
        soon=53,
        steps=80,
    ),
    Project(
        name="tensor parallel example",
        folder="examples/distributed/tensor_parallelism",
        script="tensor_parallel_example.py",
        edits={
            "log_utils.py": CPU_TORCH,
            "tensor_parallel_example.py": (CPU_MESH, ("num_iters = 10", "num_iters = {steps}")),
        },
    ),
    Project(
        name="FSDP2 example",
        folder="examples/distributed/FSDP2",
        script="example.py",
        edits={
            "example.py": (
                ("return has_gpu and gpu_count >= min_gpus", "return True"),
                (", device_id=device)", ")"),
                ("range(10)", "range({steps})"),
                ("n_layers=10", "n_layers=2"),
                ("batch_size = 32", "batch_size = 8"),
                (  # it begins with whatever is in the memory of some parameters
                    "model.to_empty(device=device)",
                    "model.to_empty(device=device)\n"
                    "        for each in model.parameters():\n            torch.nn.init.constant_(each, 0.01)",
                ),
            )
        },
    ),
    Project(
        name="nanoGPT",
        folder="nanoGPT",
        script="train.py",
        args="--backend=gloo --dtype=float32 --compile=False --dataset=made --gradient_accumulation_steps=2 "
        "--batch_size=4 --block_size=32 --n_layer=2 --n_head=2 --n_embd=32 --max_iters={steps} --eval_iters=1",
        edits={
            "train.py": (("f'cuda:{ddp_local_rank}'", "'cpu'"), ("    torch.cuda.set_device(device)\n", ""),
                         (", device_ids=[ddp_local_rank]", "")),
        },
        printed=partial(by_step, r"iter (\d+): loss (\S+),", ".4f"),
    ),
    Project(
        name="ZeroRedundancyOptimizer",
        folder="",
        script="zero_script.py",
        args="{steps}",
        printed=partial(by_step, r"step (\d+): loss (\S+)", ".6f", first=1),
    ),
    Project(
        name="accelerate with FSDP2",
        folder="",
        script="accelerate_fsdp2_script.py",
        args="{steps}",
        printed=partial(by_step, r"step (\d+): loss (\S+)", ".6f", first=1),
    ),
    Project(
        name="FSDP2 x tensor parallel, 2 x 2",
        folder="examples/distributed/tensor_parallelism",
        script="fsdp_tp_example.py",
        ranks=4,
        edits={
            "log_utils.py": CPU_TORCH,
            "llama2_model.py": (  # DTensor knows no attention on CPUs
                ("F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)",
                 "(xq @ xk.transpose(-2, -1) / 8).softmax(-1) @ xv"),
            ),
            "fsdp_tp_example.py": (
                CPU_MESH,
                ("num_iterations = 10", "num_iterations = {steps}"),
                ("dim=256, n_layers=2, n_heads=16, vocab_size=32000", "dim=32, n_layers=1, n_heads=4, vocab_size=256"),
                ("torch.randint(32000, (8, 256)", "torch.randint(256, (4, 32)"),
            ),
        },
    ),
    Project(
        name="imagenet --multiprocessing-distributed --dummy",
        folder="examples/imagenet",
        script="main.py",
        args="--dummy --multiprocessing-distributed --world-size 1 --rank 0 --dist-backend gloo --epochs 1 "
        "--dist-url tcp://127.0.0.1:{port} -a squeezenet1_1 -b 8 -j 1 -p 1",
        starts_ranks=True,
        edits={
            "main.py": (
                ("        ngpus_per_node = 1\n", "        ngpus_per_node = 2\n"),
                ("    if not use_accel:\n        print('using CPU, this will be slow')\n    elif args.distributed",
                 "    if args.distributed:\n        args.batch_size = int(args.batch_size / ngpus_per_node)\n"
                 "        model = torch.nn.parallel.DistributedDataParallel(model)\n    elif args.distributed"),
                ("1281167", "{steps} * 8"),
                ("FakeData(50000", "FakeData(16"),
                ("(3, 224, 224)", "(3, 48, 48)"),
            )
        },
        printed=partial(by_step, r"Epoch: \[0\]\[ *(\d+)/.*?Loss (\S+) ", ".4e", first=1),
    ),
    Project(
        name="nanochat base_train",
        folder="nanochat",
        script="scripts.base_train",
        module=True,
        args="--device-type=cpu --depth=2 --aspect-ratio=16 --head-dim=16 --max-seq-len=32 --device-batch-size=2 "
        "--total-batch-size=128 --num-iterations={steps} --eval-every=-1 --eval-tokens=128 --core-metric-every=-1 "
        "--sample-every=-1 --window-pattern=L",
        env={"TORCHDYNAMO_DISABLE": "1", "NANOCHAT_BASE_DIR": "{folder}/made"},
        edits={
            "nanochat/optim.py": ((".get_future()", ""), ("ReduceOp.AVG", "ReduceOp.SUM")),  # gloo has neither
            "nanochat/common.py": (
                ('if is_ddp_requested and device_type == "cuda":\n'
                 '        device = torch.device("cuda", ddp_local_rank)\n'
                 '        torch.cuda.set_device(device)  # make "cuda" default to this device\n'
                 '        dist.init_process_group(backend="nccl", device_id=device)\n',
                 'if is_ddp_requested:\n        device = torch.device("cpu")\n'
                 '        dist.init_process_group(backend="gloo")\n'),
            )
        },
        printed=smoothed,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a run left."""

    code: int
    losses: tuple[int, int] | None
    steps: int
    named: float = math.inf
    """Steps from the onset to the first finding about the late rank."""
    cause: str = ""
    wrong: Sequence[str] = ()
    """Findings about other ranks, or any in an even run."""
    said: str = ""


def prepare(project: Project, projects: Path, steps: int, kept: Path) -> tuple[Path, dict[str, str]]:
    """Copy a project into a folder with its recipe and ``sitecustomize``; return it and the environment of a run."""
    folder = Path(tempfile.mkdtemp(prefix=f"{re.sub('[^A-Za-z0-9]+', '-', project.name)}-", dir=kept))
    source = projects / project.folder if project.folder else HERE
    copy = folder / "project"
    if project.folder:
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git", "checkpoints", "snapshot.pt"))
    else:
        copy.mkdir()
        shutil.copy(source / project.script, copy)
    values = {"steps": steps, "folder": copy, "port": free_port()}
    for name, edits in project.edits.items():
        text = (copy / name).read_text()
        for old, new in edits:
            assert old in text, f"{project.name}: {name} has no {old!r}"
            text = text.replace(old, new.replace("{steps}", str(steps)))
        (copy / name).write_text(text)
    env = {key: value.format(**values) for key, value in project.env.items()} | {"OMP_NUM_THREADS": "1"}
    args = project.args.format(**values).split()
    (copy / "recipe.toml").write_text(_recipe(project, args, env))
    (copy / "args").write_text("\n".join(args))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    return folder, os.environ | env | {
        "GPUTRAIN_HOME": str(folder / "home"),
        "PYTHONPATH": str(folder / "site"),
        "NO_COLOR": "1",
    }


def call(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> int:
    """Run a command in the copy of a project, with its output in a file beside it; return its exit code."""
    with (folder / "output").open("w") as output:
        return subprocess.run(
            [sys.executable, *command],
            cwd=folder / "project",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        ).returncode


GPUTRAIN = ("-m", "gputrain_tui", "run", "recipe.toml")


def run(project: Project, projects: Path, steps: int, late: str, kept: Path) -> Trial:
    """Run a copy of a project once; ``late``: as the variable ``LATE``, empty for an even run."""
    folder, env = prepare(project, projects, steps, kept)
    code = call(GPUTRAIN, folder, env | ({"LATE": late} if late else {}))
    made = list_runs(folder / "home" / "runs")[0].dir
    return read(made, project, late, code)


def bits(project: Project, projects: Path, steps: int, kept: Path) -> str:
    """Run a project by torchrun, or by itself if it starts its ranks, and by gputrain; return the table's row."""
    checksums: list[dict[str, list[str]]] = []
    for measured in (False, True):
        folder, env = prepare(project, projects, steps, kept)
        (folder / "bits").mkdir()
        script = [*["-m"] * project.module, project.script, *(folder / "project" / "args").read_text().split()]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={project.ranks}"]
        command = GPUTRAIN if measured else script if project.starts_ranks else [*torchrun, *script]
        code = call(command, folder, env | {"BITS": str(folder / "bits")})
        assert code == 0, f"{project.name}: {code}: {folder}/output"
        checksums.append({file.name: file.read_text().split() for file in (folder / "bits").iterdir()})
    alone, measured_ones = checksums
    assert len(alone) == project.ranks
    assert alone.keys() == measured_ones.keys()
    equal = sum(sums == measured_ones[rank] for rank, sums in alone.items())
    compared = min(len(sums) for sums in alone.values())
    different = len({sums[-1] for sums in alone.values()} | {sums[0] for sums in alone.values()})
    return f"| {project.name} | {project.ranks} | {compared} | {equal} of {len(alone)} | {different} |"


def read(made: RunDir, project: Project, late: str, code: int) -> Trial:
    """Return what the record of a run shows."""
    all_steps: list[Step] = []
    findings: list[Finding] = []
    reader = RunReader(made)
    while batch := reader.poll():
        all_steps += [event for event in batch if isinstance(event, Step)]
        found = (event for event in batch if isinstance(event, Finding))
        findings += [event for event in found if event.kind == "straggler" and event.state == "raised"]
    reader.close()
    losses: list[float] = []
    for step in all_steps:
        if step.rank == 0:
            each = step.losses if step.losses is not None else [step.loss] * step.steps
            losses += [math.nan if loss is None else loss for loss in each]
    log = made.rank_log(0)
    compared = project.printed(log.read_text(), losses) if project.printed is not None and log.exists() else None
    right = [finding for finding in findings if late and finding.rank == LATE_RANK]
    named, cause = math.inf, ""
    if right:
        done = max((step.step for step in all_steps if step.time <= right[0].time), default=0)
        named, cause = done - project.onset, str(right[-1].cause)
    return Trial(
        code=code,
        losses=compared,
        steps=max((step.step for step in all_steps), default=0),
        named=named,
        cause=cause,
        wrong=[f"{finding.step}: {finding.message}" for finding in findings if finding not in right],
        said="; ".join(f"{finding.step}: {finding.message}" for finding in right),
    )


def _recipe(project: Project, words: Sequence[str], env: Mapping[str, str]) -> str:
    quoted = ", ".join(f"'{word}'" for word in words)
    lines = ['name = "other"', "[[cluster.nodes]]", f"cpu_ranks = {project.ranks}"]
    lines += ["[cluster.env]", *(f'{key} = "{value}"' for key, value in env.items())]
    lines += ["[train]", f'script = "{project.script}"', f"args = [{quoted}]"]
    lines += ["module = true"] * project.module + ["starts_ranks = true"] * project.starts_ranks
    return "\n".join(lines) + "\n"


def row(project: Project, trials: Sequence[Trial], even: Sequence[Trial]) -> str:
    """Return the project's row of the table."""
    soon = [trial for trial in trials if trial.named <= project.soon]
    at = [trial.named for trial in trials if trial.named < math.inf]
    right = sum(trial.cause == "forward" for trial in trials)
    compared = [trial.losses for trial in [*trials, *even] if trial.losses is not None]
    equal, printed = sum(each[0] for each in compared), sum(each[1] for each in compared)
    cells = [
        project.name,
        str(project.ranks),
        str(len(trials)),
        f"{len(soon)} of {len(trials)}" + f" (within {project.soon})" * (project.soon != SOON),
        f"{statistics.median(at):.0f}, {max(at):.0f}" if at else "–",
        f"{right} of {len(trials)}",
        f"{sum(len(trial.wrong) for trial in trials)} of {len(trials)}",
        f"{sum(len(trial.wrong) for trial in even)} in {sum(trial.steps for trial in even):,} steps",
        f"{equal:,} of {printed:,}" if printed else "prints none",
        str(sum(trial.code != 0 for trial in [*trials, *even])),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the projects")
    parser.add_argument("--times", type=int, default=10, help="runs with a late rank")
    parser.add_argument("--even-runs", type=int, default=1)
    parser.add_argument("--even-steps", type=int, default=1000, help="steps of a run in which no rank is late")
    parser.add_argument("--only", default="", help="projects whose name matches this regular expression")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--bits", type=int, default=0, help="compare the parameters of this many steps instead")
    arguments = parser.parse_args()
    kept = arguments.keep.resolve() if arguments.keep else Path(tempfile.mkdtemp(prefix="other-projects-"))
    kept.mkdir(exist_ok=True, parents=True)
    chosen = [project for project in PROJECTS if re.search(arguments.only, project.name)]
    if arguments.bits:
        print("| project | ranks | steps | ranks with equal parameters at every step | different parameters |")
        print("|---|---|---|---|---|", flush=True)
        for project in chosen:
            print(bits(project, arguments.folder, arguments.bits, kept), flush=True)
        return
    print(
        f"| project | ranks | runs | slow rank named within {SOON} steps | at step (median, max) | phase right "
        "| other ranks named | false stragglers in even runs | printed losses equal | runs failed |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for project in chosen:
        late = ":".join(map(str, (LATE_RANK, project.onset, *project.late_ms)))
        trials: list[Trial] = []
        even: list[Trial] = []
        for times, steps, fault, into in (
            (arguments.times, project.steps, late, trials),
            (arguments.even_runs, arguments.even_steps, "", even),
        ):
            for _ in range(times):
                into.append(trial := run(project, arguments.folder, steps, fault, kept))
                print(project.name, trial, file=sys.stderr, flush=True)
        print(row(project, trials, even), flush=True)
    if arguments.keep is None:
        shutil.rmtree(kept)


if __name__ == "__main__":
    main()
