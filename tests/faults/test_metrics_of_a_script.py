"""A metric that an unchanged script gives to a tracker's client, from the call to list, table and report."""

from __future__ import annotations

import csv
import io
import json

from bench import Bench
from waiting import LIMIT_S

CLIENT = """\
def log_metric(key, value, step=None): pass
def log_metrics(metrics, step=None): pass
"""
SCRIPT = """\
import mlflow, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(1, 31):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mlflow.log_metric("train/accuracy", step / 30)
mlflow.log_metrics({"final": torch.tensor(0.5), "not": float("nan")}, step=1)
"""
RECIPE = """\
[train]
script = "{folder}/train.py"

[[cluster.nodes]]
cpu_ranks = 2
"""


def test_a_metric_is_seen_in_list_table_and_report(bench: Bench) -> None:
    (bench.folder / "mlflow.py").write_text(CLIENT)
    (bench.folder / "train.py").write_text(SCRIPT)
    recipe = bench.folder / "script.toml"
    recipe.write_text(RECIPE.format(folder=bench.folder))
    process = bench.start("run", recipe)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "metrics    train/accuracy 1  final 0.5  not nan" in out + err

    def said(*words: str) -> str:
        output, problem = bench.start(*words).communicate(timeout=LIMIT_S)
        assert not problem or "steps of 2 ranks" in problem, problem
        return output

    (entry,) = json.loads(said("runs", "--json", "--filter", "metric:train/accuracy>=1"))
    assert entry["metrics"] == {"train/accuracy": 1.0, "final": 0.5, "not": None}
    assert json.loads(said("runs", "--json", "--filter", "metric:final>0.5")) == []
    assert json.loads(said("report", "last", "--json"))["metrics"] == entry["metrics"]
    rows = list(csv.DictReader(io.StringIO(said("export", "last", "--to", "csv", "-o", "-"))))
    assert [row["metric:final"] for row in rows if row["step"] == "30"] == ["0.5", "0.5"]
    assert {row["metric:train/accuracy"] for row in rows if row["step"] == "30"} == {"1.0"}
