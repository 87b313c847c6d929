from __future__ import annotations

import io
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recipe_texts import recipe_of, refusal

from gputrain_tui.recipe.build import build, load
from gputrain_tui.recipe.model import Cluster, ClusterOptions, Node, NodeOptions, Recipe, ReportOptions, train_options
from gputrain_tui.recipe.pytext import DEFAULTS
from gputrain_tui.recipe.source import key_lines, override
from gputrain_tui.recipe.toml_writer import dump_toml
from gputrain_tui.recipe.values import parse_gpus
from trainer.contract.errors import RequestError
from trainer.contract.schema import describe

ROOT = Path(__file__).parents[2]

MNIST = """\
name = "mnist-two-nodes"

[cluster]                       # where
port = 11111
[[cluster.nodes]]
host = "10.0.0.1"
gpus = 4
[[cluster.nodes]]
host = "10.0.0.2"
cpu_ranks = 2

[train]                         # what
task = "mnist"
batch_size = 64                 # per rank
max_epochs = 20
optimizer = "adadelta"
lr = 1.01
join_timeout = 20

[task]
data = "/data/mnist"
"""

PYTEXT = {
    "config": {
        "task": {
            "DocClassificationTask": {
                "data_handler": {
                    "columns_to_read": ["text", "doc_label"],
                    "train_path": "base_dir/train_tiny.tsv",
                    "eval_path": "base_dir/test_tiny.tsv",
                    "test_path": "base_dir/test_tiny.tsv",
                }
            }
        },
        "use_cuda_if_available": True,
        "distributed_world_size": 8,
    }
}
"""The seed's own ``distributed_docnn.json``."""


def values_of(found: Recipe) -> tuple[Any, ...]:
    """The values of a recipe, without its file and lines."""
    return found.name, found.cluster, found.train, found.launch, found.script, dict(found.task_options), found.report


def test_a_recipe_is_read_with_its_tables_typed() -> None:
    found = recipe_of(MNIST)
    assert found.name == "mnist-two-nodes"
    assert found.cluster == Cluster(
        port=11111, nodes=(Node(host="10.0.0.1", gpus=4), Node(host="10.0.0.2", cpu_ranks=2))
    )
    assert (found.train.task, found.train.batch_size, found.train.lr) == ("mnist", (64,), (1.01,))
    assert found.launch.join_timeout == 20.0
    assert found.task_options == {"data": "/data/mnist"}
    assert found.script is None
    assert found.origin.text == MNIST


def stdin_of(text: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(text.encode()))


def test_the_same_recipe_is_read_from_toml_json_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tomllib.loads(MNIST)
    (tmp_path / "a.toml").write_text(MNIST)
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "no-suffix").write_text("\n  " + json.dumps(values, indent=2))
    expected = values_of(load(str(tmp_path / "a.toml")))
    for source, stdin in (
        (str(tmp_path / "a.json"), ""),
        (str(tmp_path / "no-suffix"), ""),
        ("-", MNIST),
        ("-", json.dumps(values)),
    ):
        monkeypatch.setattr("sys.stdin", stdin_of(stdin))
        assert values_of(load(source)) == expected


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf" + MNIST.replace("\n", "\r\n").encode())
    assert values_of(load(str(path))) == values_of(recipe_of(MNIST))


def test_a_recipe_without_a_name_is_called_like_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small run.toml"
    path.write_text('[train]\ntask = "mnist"\n[task]\ndata = "d"\n')
    assert load(str(path)).name == "small run"
    monkeypatch.setattr("sys.stdin", stdin_of(path.read_text()))
    assert load("-").name == "recipe"


def test_a_recipe_without_a_cluster_means_this_machine() -> None:
    assert recipe_of('[train]\ntask = "mnist"\n[task]\ndata = "d"\n').cluster == Cluster(nodes=(Node(),))


BASE = '[train]\ntask = "mnist"\n[task]\ndata = "d"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MNIST.replace("lr = ", "lrr = "), "r.toml:17: train.lrr is not known; did you mean 'lr'?"),
        (
            MNIST.replace("lr = 1.01", "fast_stat_sync = true"),
            "r.toml:17: train.fast_stat_sync is not known: remove it, counts and losses are always",
        ),
        (
            MNIST.replace("lr = 1.01", "stop_time_hours = 2"),
            "r.toml:17: train.stop_time_hours is not known: --stop-time MINUTES",
        ),
        (MNIST.replace("1.01", '"fast"'), "r.toml:17: train.lr is 'fast', but must be one or more numbers > 0"),
        (MNIST.replace("1.01", "-1"), "r.toml:17: train.lr is -1, but must be one or more numbers > 0"),
        (MNIST.replace("1.01", "nan"), "r.toml:17: train.lr is nan, but must be one or more numbers > 0"),
        (MNIST.replace("1.01", "true"), "r.toml:17: train.lr is True, but must be one or more numbers > 0"),
        (MNIST.replace("64", "[64, 0]"), "r.toml:14: train.batch_size is [64, 0], but must be "),
        (
            MNIST.replace('"adadelta"', '"adadlta"'),
            "r.toml:16: train.optimizer is 'adadlta', but must be one of adadelta, adagrad, adam, adamw, muon, "
            "schedulefree_adamw, sgd; did you mean 'adadelta'?",
        ),
        (MNIST.replace("data =", "dta ="), "r.toml:21: task.dta is not known; did you mean 'data'?"),
        (BASE.replace('data = "d"', ""), "r.toml:3: task.data is missing: folder of MNIST's four IDX files"),
        (MNIST.replace('"adadelta"', '"adamW"'), "schedulefree_adamw, sgd; did you mean 'adamw'?"),
        (MNIST.replace("port", "prot"), "r.toml:4: cluster.prot is not known; did you mean 'port'?"),
        *(
            (
                MNIST.replace("11111", value),
                f"r.toml:4: cluster.port is {value}, but must be an integer >= 0 and <= 65535",
            )
            for value in ("-1", "65536", "70000", "'abc'", "1.5")
        ),
        (MNIST.replace("cpu_ranks", "cpuranks"), "r.toml:10: cluster.nodes[1].cpuranks is not known"),
        (MNIST.replace("cpu_ranks = 2", "cpu_ranks = 0"), "r.toml:10: cluster.nodes[1].cpu_ranks is 0, but must be"),
        (MNIST.replace("cpu_ranks = 2", ""), "r.toml:8: cluster.nodes[1] has no ranks; give one of gpus"),
        (MNIST.replace("gpus = 4", "gpus = 4\ncpu_ranks = 1"), "r.toml:5: cluster.nodes[0] has gpus and cpu_ranks"),
        (MNIST.replace("gpus = 4", "gpus = 0"), "r.toml:7: cluster.nodes[0].gpus is 0, but must be a count >= 1"),
        (MNIST.replace("gpus = 4", 'gpus = "al"'), '"all" or "free"; did you mean \'all\'?'),
        (MNIST.replace('host = "10.0.0.1"', "host = 5"), "r.toml:6: cluster.nodes[0].host is 5, but must be text"),
        (MNIST.replace("10.0.0.1", "-oProxyCommand=x"), "host is '-oProxyCommand=x', but must be a host name or"),
        (MNIST.replace("10.0.0.1", "ada@gpu1:22"), "host is 'ada@gpu1:22', but must be a host name or an address"),
        (MNIST.replace("10.0.0.1", "a b"), "r.toml:6: cluster.nodes[0].host is 'a b', but must be a host name or"),
        ("[cluster]\nnodes = []\n" + BASE, "r.toml:2: cluster.nodes is empty"),
        ("[cluster.nodes]\ngpus = 1\n" + BASE, "cluster.nodes must be a list of tables: write [[cluster.nodes]]"),
        (
            '[cluster]\ninit_method = "tcp://h"\n' + BASE,
            "r.toml:2: cluster.init_method is 'tcp://h', but must be auto,",
        ),
        ('[cluster]\ninit_method = "tcp://h:0"\n' + BASE, "r.toml:2: cluster.init_method names port 0, but a port is"),
        ('[cluster]\ninit_method = "file://a/b"\n' + BASE, "but must be auto, tcp://HOST:PORT, file:///SHARED/PATH"),
        ('[cluster]\nport = 1\ninit_method = "tcp://h:2"\n' + BASE, "cluster.port is 1, but init_method names port 2"),
        ("[cluster]\nmax_restarts = 1.5\n" + BASE, "r.toml:2: cluster.max_restarts is 1.5, but must be an integer"),
        (
            BASE.replace("mnist", "mnits"),
            "r.toml:2: train.task is 'mnits': there is no such task; did you mean 'mnist'?",
        ),
        (BASE.replace('task = "mnist"', "lr = 1"), "r.toml:1: train.task is missing: lm, docnn, mnist, masked_lm, or"),
        (BASE.replace('"mnist"', "7"), "r.toml:2: train.task is 7, but must be text"),
        ("lr = 0.1\n" + BASE, "r.toml:1: lr is not known; it belongs in [train]"),
        ("port = 1\n" + BASE, "r.toml:1: port is not known; it belongs in [cluster]"),
        ("[trian]\n" + BASE, "r.toml:1: trian is not known; did you mean 'train'?"),
        ("train = 5\n[task]\n", "r.toml:1: train is 5, but must be a table"),
        ("name = 3\n" + BASE, 'r.toml:1: name is 3, but name is text: write name = "3"'),
        (f'name = "{"x" * 101}"\n' + BASE, "r.toml:1: name has 101 characters; at most 100 are allowed"),
        (BASE.replace("[task]", 'data = "d"\n[task]'), "r.toml:3: train.data is not known; it belongs in [task]"),
        (BASE + "lr = 0.1\n", "r.toml:5: task.lr is not known; it belongs in [train]"),
        (
            '[train]\ntask = "own.py:Own"\nwidth = 3\n',
            "r.toml:3: train.width is not known; an option of your own task belongs in [task]",
        ),
        (BASE.replace("[task]", "cpu = true\n[task]"), "r.toml:3: train.cpu is computed; set cpu_ranks of a node"),
        (BASE.replace("[task]", "distributed_rank = 4\n[task]"), "train.distributed_rank is computed for every node"),
        (BASE.replace("[task]", 'script = "t.py"\n[task]'), "r.toml:3: train.script and train.task exclude each other"),
        ('[train]\nargs = ["--lr"]\n', "r.toml:1: train.script is missing"),
        ('[train]\nscript = "t.py"\nlr = 1.0\n', "r.toml:3: train.lr is for tasks, but train.script runs a script"),
        (
            '[train]\nscript = "t.py"\nresume = "x"\n',
            "r.toml:3: train.resume is for tasks: a script takes its own option",
        ),
        ('[train]\nscript = "t.py"\n[task]\nx = 1\n', "r.toml:3: task is for a task, but train.script runs a script"),
        ("[train\n", "r.toml:1: is not valid TOML: Expected ']' at the end of a table declaration"),
        ("a = 1\nb = 'x\n", "r.toml:2: is not valid TOML"),
        (
            "[cluster]\non_stall = stop  # now\n",
            'r.toml:2: is not valid TOML: Invalid value; a text needs quotes: on_stall = "stop"',
        ),
        ("[train]\nlr = 0,05  # now\n", "; a number has a decimal point: lr = 0.05"),
        (
            '[cluster.nodes]\nhost = "a"\n[cluster.nodes]\nhost = "b"\n',
            "r.toml:3: is not valid TOML: Cannot declare ('cluster', 'nodes') twice; "
            "write [[cluster.nodes]] before each node",
        ),
        (
            '[train]\ntask = "my.py"\n',
            "r.toml:2: train.task is 'my.py': a file has no task without the name of its class: my.py:Class",
        ),
        ("a = 1\nb = ~/x", 'r.toml:2: is not valid TOML: Invalid value; a text needs quotes: b = "~/x"'),
        (
            '[train]\nscript = "t.py"\non_stall = "stop"\n',
            "r.toml:3: train.on_stall is not known; it belongs in [cluster]",
        ),
        (
            '[cluster]\nmin_ranks = 5\n[train]\nscript = "t.py"\n',
            "r.toml:2: cluster.min_ranks needs nodes on other hosts, started over ssh, but no node names a host",
        ),
        ("a = 1\na = 2\n", "r.toml:2: is not valid TOML: Cannot overwrite a value"),
        ('{"train": {"task": "mnist",}\n}', "r.toml:1: is not valid JSON"),
        ("", "r.toml: train.task is missing"),
    ],
)
def test_an_error_is_one_line_with_file_line_and_key(text: str, message: str) -> None:
    assert message in refusal(text)


def test_json_errors_name_the_line_too() -> None:
    text = json.dumps({"train": {"task": "mnist", "lrr": 1}, "task": {"data": "d"}}, indent=1)
    assert refusal(text, name="r.json") == "r.json:4: train.lrr is not known; did you mean 'lr'?"
    assert "r.json:1: is not valid JSON" in refusal("[1, 2", name="r.json")
    assert "a JSON recipe must be an object in braces, but this is a list" in refusal("[1, 2]", name="r.json")
    assert "a JSON recipe must be an object in braces, but this is a list" in refusal('[{"train": {}}]')


def test_a_duplicate_key_of_a_json_object_is_refused_with_its_line() -> None:
    text = '{\n "train": {"task": "mnist",\n  "lr": 1,\n  "lr": 2}}'
    assert refusal(text, name="r.json") == "r.json:4: 'lr' occurs twice in one object; keep one of them"
    two = '{"cluster": {"nodes": [{"gpus": 1}, {"gpus": 1, "gpus": 2}]}}'
    assert refusal(two, name="r.json") == "r.json: 'gpus' occurs twice in one object; keep one of them"


def test_more_ranks_than_a_machine_can_have_are_a_slip_of_the_finger() -> None:
    for node, words in (
        ("cpu_ranks = 100000", "cluster.nodes[0].cpu_ranks is 100000, but must be an integer >= 1 and <= 1024"),
        ("ranks = 100000", "cluster.nodes[0].ranks is 100000"),
        ("gpus = 100000", "cluster.nodes[0].gpus is 100000, but one machine has at most 1024 ranks"),
    ):
        assert words in refusal(f'[[cluster.nodes]]\n{node}\n[train]\ntask = "mnist"\n[task]\ndata = "d"')


def test_an_empty_name_is_no_recipe() -> None:
    with pytest.raises(RequestError, match="the recipe's name is empty"):
        load("")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text(BASE)
    (tmp_path / "binary.toml").write_bytes(b"name = '\xff'")
    for name, message in (
        ("dmeo.toml", "there is no such file; did you mean 'demo.toml'?"),
        ("demo", "there is no such file; did you mean 'demo.toml'?"),
        ("missing/demo.toml", "there is no such file"),
        ("binary.toml", "is not UTF-8 text (byte 8)"),
        (".", "cannot be read: Is a directory"),
    ):
        with pytest.raises(RequestError, match=r"^[^\n]+$") as caught:
            load(str(tmp_path / name))
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("train.lr=0.5", lambda found: found.train.lr == (0.5,)),
        ("train.lr = 2", lambda found: found.train.lr == (2.0,)),
        ("train.optimizer=sgd", lambda found: found.train.optimizer == "sgd"),
        ('train.optimizer="sgd"', lambda found: found.train.optimizer == "sgd"),
        ("train.batch_size=[32, 8]", lambda found: found.train.batch_size == (32, 8)),
        ("train.batch_size=32,8", lambda found: found.train.batch_size == (32, 8)),
        ("train.shuffle=false", lambda found: found.train.shuffle is False),
        ("train.start_method=spawn", lambda found: found.launch.start_method == "spawn"),
        ("task.data=/a=b c", lambda found: found.task_options["data"] == "/a=b c"),
        ("name=2024-01-01", lambda found: found.name == "2024-01-01"),
        ("cluster.nodes=[{cpu_ranks=2}]", lambda found: found.cluster.nodes == (Node(cpu_ranks=2),)),
        ("cluster.nodes.1.cpu_ranks=7", lambda found: found.cluster.nodes[1].cpu_ranks == 7),
        ("cluster.nodes[0].gpus=[1, 3]", lambda found: found.cluster.nodes[0].gpus == (1, 3)),
        ("cluster.nodes[0].gpus=free", lambda found: found.cluster.nodes[0].gpus == "free"),
        ("cluster.backend=gloo", lambda found: found.cluster.backend == "gloo"),
        ("cluster.env.A=0.2", lambda found: found.cluster.env["A"] == "0.2"),
    ],
)
def test_a_setting_overrides_any_key(setting: str, read: Any) -> None:
    assert read(recipe_of(MNIST, setting))


def test_a_setting_makes_the_tables_that_it_needs() -> None:
    found = recipe_of("", "train.task=mnist", "task.data=d", "cluster.max_restarts=2")
    assert (found.train.task, found.cluster.max_restarts) == ("mnist", 2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.lrr=1", "--set train.lrr is not known; did you mean 'lr'?"),
        ("train.lr=fast", "--set train.lr is 'fast', but must be one or more numbers > 0"),
        ("train.lr", "--set train.lr is not KEY=VALUE"),
        ("=1", "--set =1 is not KEY=VALUE"),
        ("train..lr=1", "is not KEY=VALUE"),
        ("name.x=1", "--set name.x: name is 'mnist-two-nodes', which has no keys"),
        ("cluster.nodes.2.gpus=1", "--set cluster.nodes.2.gpus: cluster.nodes has no entry '2' (entries: 0 to 1)"),
        ("cluster.nodes.gpus=1", "has no entry 'gpus' (entries: 0 to 1); did you mean cluster.nodes[0].gpus?"),
        ("cluster.nodes[0].gpus=-1", "--set cluster.nodes[0].gpus is -1, but must be a count"),
        ("cluster=5", "--set cluster is 5, but must be a table"),
        ("cluster.workdir=code", "--set cluster.workdir is 'code', but must be an absolute path, or start with ~/"),
        ("cluster.nodes[0].python=-m", "--set cluster.nodes[0].python is '-m', but must be the path or the name"),
        ('cluster.setup="a\\nb"', "--set cluster.setup is 'a\\nb', but must be one line of shell; join several with"),
        ("cluster.env=5", "--set cluster.env is 5, but must be a table, such as "),
        ("cluster.env.A=[1]", "--set cluster.env.A is [1], but must be text or a number"),
        ('cluster.env={"A=B" = 1}', "--set cluster.env.A=B is not a valid name of an environment variable"),
        ("cluster.nodes[0].env.MASTER_PORT=1", "--set cluster.nodes[0].env.MASTER_PORT is computed; set cluster.port"),
        ("trian.lr=5", "--set trian is not known"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_typed(setting: str, message: str) -> None:
    assert message in refusal(MNIST, setting)


def test_a_setting_of_one_argument_of_a_script_is_text_and_a_wrong_entry_is_blamed_on_it() -> None:
    script = '[[cluster.nodes]]\ncpu_ranks = 1\n[train]\nscript = "/t.py"\nargs = ["--lr", "0.1"]\n'
    assert recipe_of(script, "train.args.1=0.2").script.args == ("--lr", "0.2")
    assert recipe_of(script, "train.args[0]=--rate").script.args == ("--rate", "0.1")
    assert "--set train.args[1] is ['--lr', ['a']], but must be a list of texts" in refusal(
        script, "train.args.1=['a']"
    )


def test_overrides_leave_the_values_that_they_start_from_alone() -> None:
    data = {"a": {"b": [1, {"c": 2}]}}
    changed, keys = override(data, ["a.b.1.c=3"])
    assert changed == {"a": {"b": [1, {"c": 3}]}}
    assert data == {"a": {"b": [1, {"c": 2}]}}
    assert keys == {("a", "b", 1, "c")}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4, 4),
        ("4", 4),
        ([0, 2], (0, 2)),
        ("0,2", (0, 2)),
        ("[3]", (3,)),
        ("all", "all"),
        (" free ", "free"),
        (["GPU-ab", "GPU-cd"], ("GPU-ab", "GPU-cd")),
        ("GPU-ab", ("GPU-ab",)),
        ('["MIG-1", 2]', ("MIG-1", 2)),
    ],
)
def test_gpus_are_a_count_a_list_all_or_free(value: Any, expected: Any) -> None:
    assert parse_gpus(value, where="w") == expected


@pytest.mark.parametrize("value", [0, -1, True, 1.5, [], [-1], [True], "some", "", ["a"], {"a": 1}, "1,x"])
def test_anything_else_for_gpus_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^w is .*, but must be a count >= 1, a list of device ids"):
        parse_gpus(value, where="w")


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a = 1\n[t]\nb = 2", ("t", "b"), 3),
        ("# a = 1\n\na = 1", ("a",), 3),
        ('[a."b.c"]\nd = 1', ("a", "b.c", "d"), 2),
        ("x.y.z = 1", ("x", "y"), 1),
        ('s = """\n[no]\nkey = 1\n"""\nt = 1', ("t",), 5),
        ("s = '''a'''\nt = '#' # c\nu = 1", ("u",), 3),
        ('s = "a\\"[x]"\nt = 1', ("t",), 2),
        ("l = [\n 1,\n 2, # two\n]\nt = 1", ("l", 1), 3),
        ("l = [\n {a = 1},\n {a = 2, b = {c = 3}},\n]", ("l", 1, "b", "c"), 3),
        ("[[n]]\na = 1\n[[n]]\na = 2\n[n.sub]\nb = 1", ("n", 1, "a"), 4),
        ("[[n]]\na = 1\n[[n]]\na = 2\n[n.sub]\nb = 1", ("n", 1, "sub", "b"), 6),
        ("d = 2024-01-01T07:32:00Z\nf = 1.5e-3\ng = 1", ("g",), 3),
    ],
)
def test_the_line_of_a_toml_key_is_found(text: str, key: tuple[str | int, ...], line: int) -> None:
    tomllib.loads(text)
    assert key_lines(text, "toml")[key] == line


def test_the_line_of_a_json_key_is_found_at_any_depth() -> None:
    text = '{\n "a": {"b": [1,\n {"c": "}],\\"x"},\n {"c": 1}]},\n "d": -1.5e3\n}'
    json.loads(text)
    lines = key_lines(text, "json")
    assert (lines[("a",)], lines[("a", "b", 1, "c")], lines[("a", "b", 2, "c")], lines[("d",)]) == (2, 3, 4, 5)


def test_unchanged_recipes_are_kept_to_the_letter() -> None:
    assert dump_toml(recipe_of(MNIST)) == MNIST


@pytest.mark.parametrize(
    "settings",
    [
        ("train.lr=0.5", "train.seed=7", "task.data=/other"),
        ("cluster.nodes=[{cpu_ranks=2}]",),
        ("cluster.nodes[0].gpus=[1, 3]", "cluster.init_method=tcp://h:11111"),
        ("train.batch_size=[8, 8]", "name=other", "train.start_method=spawn"),
        ("train.lr=0.001",),
    ],
)
def test_changed_recipes_keep_their_comments_and_load_to_the_same(settings: tuple[str, ...]) -> None:
    found = recipe_of(MNIST, *settings)
    text = dump_toml(found)
    assert values_of(recipe_of(text)) == values_of(found)
    assert "# where" in text
    assert "# per rank" in text


def test_a_recipe_changed_in_a_form_is_written_with_its_comments() -> None:
    found = recipe_of(MNIST)
    changed = replace(
        found,
        name="form",
        train=msgspec.structs.replace(found.train, lr=(2.0,), task="mnist", batch_size=(16, 16)),
        cluster=msgspec.structs.replace(found.cluster, port=0, max_restarts=3),
        task_options={"data": "/elsewhere", "valid_subset": "none"},
    )
    text = dump_toml(changed)
    assert values_of(recipe_of(text)) == values_of(changed)
    assert "# per rank" in text


@pytest.mark.parametrize(
    "text",
    [
        *(json.dumps(tomllib.loads(MNIST)), json.dumps(PYTEXT), BASE, '{"train": {"script": "a.py", "args": ["-x"]}}'),
        '{"train": {"script": "a.py", "instrument": false}}',
    ],
)
def test_every_recipe_is_written_as_toml_that_loads_to_the_same(text: str) -> None:
    found = recipe_of(text)
    assert values_of(recipe_of(dump_toml(found))) == values_of(found)


def test_pytexts_own_configuration_becomes_a_docnn_recipe() -> None:
    found = build(json.dumps(PYTEXT), name="distributed_docnn.json")
    assert found.cluster.nodes == (Node(ranks=8),)
    assert found.name == "distributed_docnn"
    assert found.task_options == {
        "train_path": "base_dir/train_tiny.tsv",
        "eval_path": "base_dir/test_tiny.tsv",
        "test_path": "base_dir/test_tiny.tsv",
        "format": "no_header",
        "text_column": "0",
        "label_column": "1",
    }
    train = found.train
    assert (train.task, train.batch_size, train.max_epochs, train.optimizer) == ("docnn", (16,), 10, "adam")
    assert (train.lr, train.weight_decay, train.seed, train.best_metric) == ((1e-3,), 1e-5, 0, "accuracy")


def pytext(**changes: Any) -> str:
    return json.dumps({"config": {**PYTEXT["config"], **changes}}, indent=1)


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [
        ({"use_cuda_if_available": False}, (Node(cpu_ranks=8),)),
        ({"distributed_world_size": 1}, (Node(ranks=1),)),
    ],
)
def test_pytexts_world_size_and_cuda_set_the_nodes(changes: dict[str, Any], nodes: tuple[Node, ...]) -> None:
    assert recipe_of(pytext(**changes)).cluster.nodes == nodes


def test_pytexts_keys_are_read_without_the_wrapper_and_with_recipe_tables() -> None:
    assert recipe_of(json.dumps(PYTEXT["config"])).cluster.nodes == (Node(ranks=8),)
    own = {"config": {**tomllib.loads(BASE), "distributed_world_size": 2, "use_cuda_if_available": False}}
    found = recipe_of(json.dumps(own))
    assert (found.train.task, found.cluster.nodes) == ("mnist", (Node(cpu_ranks=2),))


def test_pytexts_training_settings_are_translated() -> None:
    task = {
        "DocClassificationTask": {
            "data": {
                "source": {"TSVDataSource": {"train_filename": "t.tsv", "field_names": ["label", "text"]}},
                "batcher": {"PoolingBatcher": {"train_batch_size": 4}},
            },
            "trainer": {"epochs": 3, "max_clip_norm": None, "optimizer": {"SGD": {"lr": 0.1, "momentum": 0.9}}},
            "model": {"DocModel": {"representation": {"DocNNRepresentation": {"cnn": {"kernel_sizes": [2, 3, 4]}}}}},
        }
    }
    found = recipe_of(pytext(task=task, random_seed=5, use_tensorboard=True, export_onnx_path="/tmp/model.onnx"))
    train = found.train
    assert (train.batch_size, train.max_epochs, train.optimizer, train.lr, train.momentum) == (
        (4,),
        3,
        "sgd",
        (0.1,),
        0.9,
    )
    assert (train.seed, train.clip_norm) == (5, 0.0)
    assert found.task_options["kernel_sizes"] == [2, 3, 4]
    tensorboard, export = found.notes
    assert "use_tensorboard has no effect" in tensorboard
    assert "export_onnx_path has no effect: `gputrain export RUN --to safetensors` writes the weights" in export


def tsv_source(**source: Any) -> str:
    """Write a configuration of PyText whose data comes from TSV files, in the spelling of its newer versions."""
    table = {"data": {"source": {"TSVDataSource": {"train_filename": "t.tsv", **source}}}}
    return pytext(task={"DocumentClassificationTask": table})


@pytest.mark.parametrize(
    ("source", "columns"),
    [
        ({"field_names": ["label", "slots", "text"]}, ("2", "0")),
        ({"field_names": ["stars", "phrase"], "column_mapping": {"phrase": "text", "stars": "doc_label"}}, ("1", "0")),
        ({"field_names": ["text", "stars"], "column_mapping": {"stars": "label"}}, ("0", "1")),
        ({"column_mapping": {"phrase": "text", "stars": "label"}}, ("phrase", "stars")),
        ({"column_mapping": {"phrase": "text"}}, ("phrase", None)),
        ({}, (None, None)),
    ],
)
def test_pytexts_columns_are_found_by_number_or_by_name(
    source: dict[str, Any], columns: tuple[str | None, str | None]
) -> None:
    options = recipe_of(tsv_source(**source)).task_options
    assert (options.get("text_column"), options.get("label_column")) == columns
    assert options.get("format") == ("no_header" if "field_names" in source else None)


REPORT = '[train]\nscript = "a.py"\n[report]\n'


@pytest.mark.parametrize(
    ("keys", "report"),
    [
        ("tensorboard = true", ReportOptions(tensorboard="true")),
        ("tensorboard = false", ReportOptions()),
        ('tensorboard = "runs"\nwandb = "mnist"', ReportOptions(tensorboard="runs", wandb="mnist")),
        ('on_end = "echo $GPUTRAIN_RUN_STATUS"', ReportOptions(on_end="echo $GPUTRAIN_RUN_STATUS")),
        ('on_finding = "cat"', ReportOptions(on_finding="cat")),
    ],
)
def test_a_recipe_sets_the_live_sinks(keys: str, report: ReportOptions) -> None:
    found = recipe_of(REPORT + keys)
    assert found.report == report
    changed = replace(found, name="other")
    assert (keys in dump_toml(changed)) == (report != ReportOptions()), "in its own spelling, and no default"
    assert recipe_of(dump_toml(changed)).report == report


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("tensorbord = true", "r.toml:4: report.tensorbord is not known; did you mean 'tensorboard'?"),
        ("tensorboard = 3", "r.toml:4: report.tensorboard is 3, but must be text or true or false"),
        ('wandb = ""', "r.toml:4: report.wandb is '', but must be text"),
        ('on_found = "true"', "r.toml:4: report.on_found is not known; did you mean 'on_end' or 'on_finding'?"),
        ("on_end = 1", 'r.toml:4: report.on_end is 1, but must be text: write "1" with its quotes'),
    ],
)
def test_an_invalid_report_key_is_one_line(keys: str, message: str) -> None:
    assert refusal(REPORT + keys) == message


def test_a_column_may_be_given_by_number_as_well_as_by_name() -> None:
    recipe = '[train]\ntask = "docnn"\nmax_updates = 1\n[task]\ntrain_path = "t.tsv"\n'
    found = recipe_of(recipe + 'text_column = 1\nlabel_column = "stars"\n')
    assert (found.task_options["text_column"], found.task_options["label_column"]) == ("1", "stars")
    assert "task.text_column is 1.5, but must be text or an integer" in refusal(recipe + "text_column = 1.5\n")
    both = refusal(recipe + 'text_column = 1\nformat = "glue"\n')
    assert "text_column is '1', but format is glue, which fixes both columns" in both
    unnamed = refusal(recipe + 'text_column = "phrase"\nformat = "no_header"\n')
    assert "text_column is 'phrase', but format is no_header, so that no line names the columns: give the" in unnamed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (pytext(task={"WordTaggingTask": {}}), "r.toml:4: config.task.WordTaggingTask has no counterpart here"),
        (
            pytext(task={"DocClassificationTask": {"data_handler": {"train_pth": "x"}}}),
            "config.task.DocClassificationTask.data_handler.train_pth is not understood; did you mean",
        ),
        (pytext(task={"DocClassificationTask": {}}), "task.train_path is missing: TSV file to train on"),
        (tsv_source(field_names=["a"]), """source.TSVDataSource.field_names is ['a'], but must have a "text" and a"""),
        (tsv_source(field_names="text"), "field_names is 'text', but must be a list of column names"),
        (tsv_source(field_names=["text", "text2"], column_mapping={"text2": "text"}), "two columns map to text; keep"),
        (
            tsv_source(field_names=["stars", "text"], column_mapping={"star": "label"}),
            "column_mapping.star is not a column in ['stars', 'text']; did you mean 'stars'?",
        ),
        (
            tsv_source(column_mapping={"phrase": "txt"}),
            "column_mapping.phrase is 'txt', but must be text or label; did you mean 'text'?",
        ),
        (tsv_source(column_mapping="text"), "column_mapping is 'text', but must be a table"),
        (
            pytext(distributed_world_size=0),
            "r.toml:17: config.distributed_world_size is 0, but must be an integer >= 1",
        ),
        (pytext(use_cuda_if_available="yes"), "config.use_cuda_if_available is 'yes', but must be true or false"),
        (pytext(load_snapshot_path="m.pt"), "config.load_snapshot_path is not understood"),
        (
            pytext(cluster={"nodes": [{"gpus": 1}]}, use_cuda_if_available=False),
            "config.use_cuda_if_available is false, but cluster.nodes[0] has gpus: use cpu_ranks for CPUs",
        ),
        (json.dumps({**PYTEXT, "name": "x"}), "name is outside of config"),
        ('{"config": 3}', "r.toml:1: config is 3, but must be a table"),
    ],
)
def test_unsupported_pytext_keys_are_refused_by_name(text: str, message: str) -> None:
    assert message in refusal(text)


def test_pytexts_values_are_overridden_under_either_name() -> None:
    assert recipe_of(pytext(), "config.distributed_world_size=2").cluster.nodes == (Node(ranks=2),)
    assert recipe_of(pytext(), "train.lr=0.5").train.lr == (0.5,)
    assert "--set config.distributed_world_size is 'x'" in refusal(pytext(), "config.distributed_world_size=x")


def test_pytexts_defaults_are_options_that_exist() -> None:
    known = {option.name for option in train_options()}
    assert {name for _, name in DEFAULTS} <= known


def test_every_option_of_train_has_help_for_the_form() -> None:
    assert [option.name for option in train_options() if not option.help] == []
    for schema in (ClusterOptions, NodeOptions):
        assert [option.name for option in describe(schema) if not option.help] == []


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_every_recipe_of_the_repository_is_valid(path: Path) -> None:
    found = load(str(path))
    assert dump_toml(found) == path.read_text()
