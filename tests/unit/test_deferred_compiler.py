"""The stand-in of the compiler, each case in a process forked as a rank is: torch is loaded, its compiler not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

TRAINING = """
import importlib.util, os, sys, tempfile
import torch
from trainer.agent.deferred_compiler import defer_compiler
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

def is_imported():
    return "torch._dynamo.eval_frame" in sys.modules

def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()

defer_compiler()
with tempfile.TemporaryDirectory() as folder:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
module = torch.nn.Linear(3, 3)
model = DistributedDataParallel(module)
optimizer = torch.optim.AdamW(module.parameters(), fused=True)
train(model, optimizer)
optimizer.load_state_dict(optimizer.state_dict())
torch.save(module.state_dict(), os.devnull)
assert importlib.util.find_spec("torch._dynamo").origin.endswith("__init__.py")
assert not is_imported()
"""
"""What each rank does with options that ask for no compiler, up to a checkpoint."""

ASKED = {
    "a compilation": """
compiled = torch.compile(module, backend="eager")
assert torch.equal(compiled(torch.ones(2, 3)), module(torch.ones(2, 3)))
""",
    "a module of it, which is loaded once": """
import torch._dynamo.utils as utils
assert utils is torch._dynamo.utils is torch._dynamo.eval_frame.utils and utils.__spec__.origin == utils.__file__
""",
    "its settings as a module, to change one": """
import torch._dynamo.config as settings
assert settings.optimize_ddp is True
settings.suppress_errors = True
assert torch._dynamo.config is torch._dynamo.utils.config is settings and torch._dynamo.config.suppress_errors is True
""",
    "a module that it does not load itself": """
from torch._dynamo.backends import cudagraphs
assert sys.modules["torch._dynamo.backends.cudagraphs"] is cudagraphs and cudagraphs.__spec__.origin
""",
    "a name of it": """
from torch._dynamo import config, utils
assert config.optimize_ddp is True and utils.get_optimize_ddp_mode() == "ddp_optimizer" and utils.counters == {}
""",
    "its settings, to change one": """
torch._dynamo.config.suppress_errors = True
assert sys.modules["torch._dynamo.config"].suppress_errors is True
""",
    "a name of its own, to replace it": """
held = torch._dynamo
torch._dynamo.reset = len
assert sys.modules["torch._dynamo"] is not held and sys.modules["torch._dynamo"].reset is len is held.reset
""",
    "another attribute of a module that DDP asks": """
assert torch._dynamo.utils.counters == {}
""",
    "a function of the user's that is not to be compiled": """
@torch.compiler.disable
def own(value):
    return value + torch._dynamo.is_compiling()
assert own(1) == 1 and own.__wrapped__ is not own
""",
}


AFTER_ASKING = """
assert is_imported()
assert sys.modules["torch._dynamo"] is torch._dynamo and torch._dynamo.__file__
train(model, optimizer)
kept = torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"]
assert kept is not torch.optim.Optimizer.zero_grad.__wrapped__, "the compiler would trace the optimizer"
"""
OTHERS = {
    "threads that ask at once": TRAINING
    + """
import threading
got = []
threads = [threading.Thread(target=lambda: got.append(torch._dynamo.eval_frame)) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(got) == 8 and all(each is sys.modules["torch._dynamo.eval_frame"] for each in got)
""",
    "a call after the import of a module of it": """
import sys
import torch
from trainer.agent.deferred_compiler import defer_compiler
from trainer.telemetry.instrument.started_process import after_import
defer_compiler()
called = []
after_import("torch._dynamo.eval_frame", lambda: called.append(sys.modules["torch._dynamo.eval_frame"]))
import torch._dynamo.eval_frame as eval_frame
assert called == [eval_frame] and eval_frame is torch._dynamo.eval_frame
""",
    "a compiler that is there already stays": """
import sys
import torch._dynamo
from trainer.agent.deferred_compiler import defer_compiler
before = torch._dynamo
defer_compiler()
assert sys.modules["torch._dynamo"] is before and torch._dynamo is before
""",
}
CASES = {name: TRAINING + asks + AFTER_ASKING for name, asks in ASKED.items()} | OTHERS
LIKE_OTHERS = (
    "its settings as a module, to change one",
    "a name of it",
    "another attribute of a module that DDP asks",
)
"""Each case imports the compiler, for a second or more; these ask in ways between those of others."""

FORKING = """
import gc, json, os, sys, traceback
import trainer.agent.preload_torch
import sympy, torch  # half of what the compiler imports in each case, and nothing of it
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # in torch 2.6 it imports the compiler
    import torch.distributed.fsdp
assert "torch._dynamo" not in sys.modules
gc.disable()
for name, code in json.load(sys.stdin).items():
    if not (pid := os.fork()):
        try:
            exec(code, {"__name__": "case"})
        except BaseException:
            print(json.dumps([name, traceback.format_exc()]), flush=True)
            os._exit(1)
        print(json.dumps([name, ""]), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, str]:
    """The traceback of each selected case, empty where there was none."""
    selected = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        input=json.dumps({name: CASES[name] for name in selected}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_OTHERS else []) for name in CASES]
)
def test_the_compiler_is_imported_when_it_is_asked_for_and_not_before(errors: dict[str, str], case: str) -> None:
    assert not errors[case], errors[case]
