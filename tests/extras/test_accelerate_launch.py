"""`gputrain init` of accelerate's commands: the ranks get the variables that accelerate's own launcher gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DUMP = """\
import json, os, sys
from pathlib import Path
prefixes = ("ACCELERATE_", "FSDP_", "KMP_", "PARALLELISM_")
found = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
Path(sys.argv[1], os.environ.get("RANK", "0") + ".json").write_text(json.dumps([found, sys.argv[2:]]))
"""
COMMON = """\
compute_environment: LOCAL_MACHINE
debug: false
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
num_machines: 1
rdzv_backend: static
same_network: true
use_cpu: false
"""
CONFIGS = {
    "fsdp2, compiled": "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config:\n"
    "  fsdp_version: 2\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: true\n  fsdp_state_dict_type: "
    "SHARDED_STATE_DICT\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
    "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n  dynamo_use_fullgraph: true\n",
    "context parallel": "distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 2\n"
    "fsdp_config:\n  fsdp_version: 2\nparallelism_config:\n  parallelism_config_cp_size: 2\n"
    "  parallelism_config_cp_comm_strategy: alltoall\n",
    "two GPUs": "distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 2\n",
    "one process": "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\n",
}
SLOW = ("context parallel", "two GPUs")
"""Variants of the others; each starts accelerate's launcher, whose imports take seconds."""


def dumped(folder: Path) -> dict[str, object]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CONFIGS]
)
def test_the_ranks_get_the_variables_that_accelerate_sets(tmp_path: Path, variant: str) -> None:
    config = CONFIGS[variant]
    (tmp_path / "dump.py").write_text(DUMP)
    (tmp_path / "config.yaml").write_text(COMMON + config)
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, "GPUTRAIN_HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hf")}

    def call(*words: str) -> None:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr

    launch = ["launch", "--config_file", "config.yaml", "--debug", "dump.py"]
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    call(accelerate, *launch, "theirs", "--", "-x")
    gputrain = [sys.executable, "-P", "-m", "gputrain_tui"]
    call(*gputrain, "init", "-o", "ours.toml", "--", accelerate, *launch, "ours", "--", "-x")
    call(*gputrain, "run", "ours.toml")

    theirs, ours = dumped(tmp_path / "theirs"), dumped(tmp_path / "ours")
    assert len(theirs) == (1 if "'NO'" in config else 2)
    for found in ours.values():  # keeps a Hugging Face trainer on the CPU of a machine without GPU
        found[0].pop("ACCELERATE_USE_CPU", None)  # type: ignore[index]
    for found in theirs.values():
        found[0].pop("ACCELERATE_USE_CPU", None)  # type: ignore[index]
    assert ours == theirs
