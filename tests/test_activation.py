# SPDX-License-Identifier: Apache-2.0
"""SPIN gets into every process of TensorRT-LLM that asks for it, and into no other.

A fake `tensorrt_llm` on the path stands for the host, a fake hooks module for what is hooked. All
runs in processes of their own: what happens at the start of an interpreter cannot be tested later.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import spin_trtllm_activate

from spin_trtllm.config import SpinConfig
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.trtllm import HookRefused, activate, enable, install

ROOT = Path(__file__).parent.parent
STARTUP = ROOT / "spin_trtllm/hosts/trtllm/startup"
PTH = (STARTUP / "spin_trtllm_activate.pth").read_text(encoding="utf-8")
NEW_TREE, OLD_TREE = spin_trtllm_activate.INDEXER_MODULES
PLUGIN = ROOT / "spin_trtllm/hosts/trtllm/custom_module/spin_trtllm_ranks"

# What `site` does with a .pth file; -S and PYTHONPATH keep the installed one out of the way.
START = "import site; site.addpackage(SITE, 'spin_trtllm_activate.pth', set())"

# The fake hooks: they note what they were called with.
HOOKS = """
import spin_trtllm.hosts.trtllm as host
calls, asked = [], []
def patch(module, config, **options):
    calls.append((module.__name__, module.READY, config.target_sparsity))
    asked.append(options)
    return ["Indexer.sparse_attn_indexer"]
"""


@pytest.fixture
def site_folder(tmp_path: Path) -> Path:
    """A site-packages with the stub, a host with both trees, and fake hooks."""
    site = tmp_path / "site"
    for name in (NEW_TREE, OLD_TREE):
        path = site.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        path.write_text("READY = False\nclass Indexer: ...\nREADY = True\n")
        for folder in list(path.parents)[: len(name.split(".")) - 1]:
            (folder / "__init__.py").touch()
    (site / "spin_trtllm_activate.pth").write_text(PTH)
    (site / "fake_hooks.py").write_text(HOOKS)
    (tmp_path / "spin.yaml").write_text(SpinConfig(target_sparsity=0.25).to_yaml())
    return site


def run(
    site: Path, code: str, *, spin: str | None = "spin.yaml", bare: bool = False, **variables: str
) -> Any:
    """Run code in a Python that started with the stub; returns the JSON it prints, and its log.

    `bare` leaves site-packages out: the finder of an editable install imports modules of its own.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TLLM_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join((str(site), str(ROOT), str(STARTUP))),
        **variables,
    }
    if spin is not None:
        environment["TLLM_SPIN"] = str(site.parent / spin)
    script = site.parent / "script.py"
    script.write_text(f"SITE = {str(site)!r}\n{START}\n{code}")
    done = subprocess.run(
        [sys.executable, *(["-S"] if bare else []), str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


USE_FAKE_HOOKS = """
from spin_trtllm.hosts.trtllm import activate
activate.HOOKS_MODULE = "fake_hooks"
"""
SHOW_CALLS = """
import json, sys
hooks = sys.modules.get("fake_hooks")
print(json.dumps(hooks.calls if hooks else []))
"""


def test_without_the_variable_nothing_is_imported(site_folder: Path) -> None:
    code = """
import json, sys
before = set(sys.modules)
site.addpackage(SITE, "spin_trtllm_activate.pth", set())
print(json.dumps([sorted(set(sys.modules) - before), len(sys.meta_path)]))
"""
    (imported, finders), _ = run(site_folder, code, spin=None)
    assert imported == []
    (_, empty), _ = run(site_folder, code, spin=None, TLLM_SPIN="")
    assert empty == finders


def test_with_the_variable_the_stub_alone_is_imported(site_folder: Path) -> None:
    """Counted, not timed: the stub costs as much as the modules that it brings with it."""
    code = """
import json, sys
print(json.dumps([sorted(sys.modules), type(sys.meta_path[0]).__module__]))
"""
    (control, _), _ = run(site_folder, code, spin=None, bare=True)
    (imported, finder), _ = run(site_folder, code, bare=True)
    assert set(imported) - set(control) == {"spin_trtllm_activate", "__future__"}
    assert finder == "spin_trtllm_activate"


@pytest.mark.parametrize(("text", "every"), [("", 0), ("0", 0), ("1/7", 7)])
def test_the_hooks_are_asked_for_a_probe(site_folder: Path, text: str, every: int) -> None:
    code = f"""{USE_FAKE_HOOKS}
import json, {NEW_TREE}, fake_hooks
print(json.dumps(fake_hooks.asked))
"""
    assert run(site_folder, code, TLLM_SPIN_PROBE=text)[0] == [{"probe_every": every}]


def test_other_imports_are_left_alone(site_folder: Path) -> None:
    code = """
import json, sys, tensorrt_llm, colorsys
loaders = [type(m.__spec__.loader).__name__ for m in (tensorrt_llm, colorsys)]
print(json.dumps([loaders, "torch" in sys.modules]))
"""
    assert run(site_folder, code)[0] == [["SourceFileLoader"] * 2, False]


@pytest.mark.parametrize("name", [NEW_TREE, OLD_TREE])
def test_the_indexer_is_hooked_once_after_its_import(site_folder: Path, name: str) -> None:
    code = f"{USE_FAKE_HOOKS}\nimport {name}, {name}\n{SHOW_CALLS}"
    calls, log = run(site_folder, code, OMPI_COMM_WORLD_RANK="3")
    assert calls == [[name, True, 0.25]]
    (line,) = [line for line in log.splitlines() if "SPIN" in line]
    assert "hooked tensorrt_llm of unknown version, rank 3" in line
    assert "Indexer.sparse_attn_indexer; sparsity 0.25, blocks of 64 slots" in line


@pytest.mark.parametrize(("tree", "name"), [("new", NEW_TREE), ("old", OLD_TREE)])
def test_the_real_hooks_go_on_a_double(site_folder: Path, tree: str, name: str) -> None:
    """Imported as the host does it, through its packages, while the metadata is still to come."""
    code = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tests/trtllm")!r})
for name in [name for name in sys.modules if name.startswith("tensorrt_llm")]:
    del sys.modules[name]
sys.path.remove(SITE)
import trtllm_double
with trtllm_double.install(tree={tree!r}):
    from {name.removesuffix(".indexer")}.backend import Indexer
    print(json.dumps([Indexer.prepare.__module__, Indexer.sparse_attn_indexer.__module__]))
"""
    owners, log = run(site_folder, code)
    assert owners == ["spin_trtllm.hosts.trtllm.indexer"] * 2
    (line,) = [line for line in log.splitlines() if "SPIN" in line]
    assert "hooked tensorrt_llm 1." in line
    assert "Indexer.sparse_attn_indexer, Indexer.prepare; sparsity 0.25" in line


def test_two_names_of_one_indexer_are_hooked_once(site_folder: Path) -> None:
    code = f"{USE_FAKE_HOOKS}\nimport {NEW_TREE}, {OLD_TREE}\n{SHOW_CALLS}"
    assert [call[0] for call in run(site_folder, code)[0]] == [NEW_TREE]


def test_a_hooked_module_looks_untouched(site_folder: Path) -> None:
    code = f"""{USE_FAKE_HOOKS}
import {NEW_TREE} as module, importlib.util, inspect, json
spec = importlib.util.find_spec({OLD_TREE!r})  # looked for, not imported
print(json.dumps([
    type(module.__loader__).__name__, type(module.__spec__.loader).__name__,
    "class Indexer" in inspect.getsource(module), spec.loader.get_filename({OLD_TREE!r}),
]))
"""
    loader, spec_loader, has_source, file = run(site_folder, code)[0]
    assert (loader, spec_loader, has_source) == ("SourceFileLoader", "SourceFileLoader", True)
    assert file.endswith("indexer.py")


def test_processes_that_are_spawned_are_hooked(site_folder: Path) -> None:
    """A spawned process is a new Python. Where the stub is installed, `site` starts it there."""
    (site_folder / "sitecustomize.py").write_text(f"SITE = {str(site_folder)!r}\n{START}\n")
    (site_folder / "rank.py").write_text(
        f"def work(queue):\n"
        f"    from spin_trtllm.hosts.trtllm import activate\n"
        f"    activate.HOOKS_MODULE = 'fake_hooks'\n"
        f"    import {NEW_TREE}, fake_hooks\n"
        f"    queue.put(fake_hooks.calls)\n"
    )
    code = """
import json, multiprocessing, rank
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=rank.work, args=(queue,))
    process.start()
    print(json.dumps(queue.get()))
    process.join()
"""
    assert run(site_folder, code)[0] == [[NEW_TREE, True, 0.25]]


FAILURES = {
    "def patch(module, config, **_): raise KeyError('gone')": "KeyError: 'gone'",
    "from spin_trtllm.hosts.trtllm import HookRefused\n"
    "def patch(module, config, **_): raise HookRefused('k_fp8 is gone')": (
        "runs dense: k_fp8 is gone"
    ),
    "import no_such_module": "ModuleNotFoundError",
    "def": "SyntaxError",
}


@pytest.mark.parametrize("hooks", FAILURES)
def test_hooks_that_fail_leave_the_host_dense(site_folder: Path, hooks: str) -> None:
    (site_folder / "fake_hooks.py").write_text(hooks)
    code = f"{USE_FAKE_HOOKS}\nimport json, {NEW_TREE} as module\nprint(json.dumps(module.READY))"
    ready, log = run(site_folder, code)
    assert ready
    assert log.count("SPIN is off") == 1
    assert FAILURES[hooks] in log


def test_a_spin_yaml_that_is_not_there_leaves_the_host_dense(site_folder: Path) -> None:
    code = f"{USE_FAKE_HOOKS}\nimport {NEW_TREE}\n{SHOW_CALLS}"
    calls, log = run(site_folder, code, spin="gone.yaml")
    assert calls == []
    assert log.count("SPIN is off") == 1
    assert "gone.yaml" in log


def test_a_package_that_cannot_be_imported_leaves_the_host_dense(site_folder: Path) -> None:
    code = f"""
import sys; sys.modules["spin_trtllm"] = None
import json, {NEW_TREE} as module
print(json.dumps(module.READY))
"""
    ready, log = run(site_folder, code)
    assert ready
    assert log.count("SPIN is off") == 1


def test_an_import_that_fails_fails_as_before(site_folder: Path) -> None:
    site_folder.joinpath(*NEW_TREE.split(".")).with_suffix(".py").write_text("1 / 0")
    code = f"""
import json
try: import {NEW_TREE}
except ZeroDivisionError as error: print(json.dumps(str(error)))
"""
    assert run(site_folder, code) == ("division by zero", "")


def test_enable_reaches_modules_imported_before_and_after(site_folder: Path) -> None:
    code = f"""{USE_FAKE_HOOKS}
import os, {OLD_TREE}
from spin_trtllm import SpinConfig
from spin_trtllm.hosts.trtllm import enable
path = enable(SpinConfig(target_sparsity=0.5))
assert os.environ["TLLM_SPIN"] == str(path) and path.exists()
{SHOW_CALLS}"""
    calls, log = run(site_folder, code, spin=None)
    assert calls == [[OLD_TREE, True, 0.5]]
    assert "hooked" in log
    code = f"""{USE_FAKE_HOOKS}
import spin_trtllm
spin_trtllm.enable({str(site_folder.parent)!r})
import {NEW_TREE}
{SHOW_CALLS}"""
    assert run(site_folder, code, spin=None)[0] == [[NEW_TREE, True, 0.25]]


def test_enable_says_when_ranks_will_not_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TLLM_SPIN", "")
    monkeypatch.setattr(spin_trtllm_activate, "arm", lambda: None)
    (tmp_path / "spin.yaml").write_text(SpinConfig().to_yaml())
    monkeypatch.setattr(activate, "startup_file", lambda: tmp_path)
    assert enable(tmp_path / "spin.yaml") == tmp_path / "spin.yaml"
    assert caplog.text == ""
    monkeypatch.setattr(activate, "startup_file", lambda: None)
    enable(tmp_path)
    assert "run dense" in caplog.text


def test_enable_refuses_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_SPIN", "before")
    with pytest.raises(SpinError, match="a directory that trtllm-build wrote"):
        enable(tmp_path)
    (tmp_path / "spin.yaml").write_text("spin: {block_size: 5}")
    with pytest.raises(SpinError, match="block_size"):
        enable(tmp_path)
    assert os.environ["TLLM_SPIN"] == "before"


def test_a_version_without_hooks_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spin.yaml").write_text(SpinConfig().to_yaml())
    monkeypatch.setenv("TLLM_SPIN", str(tmp_path / "spin.yaml"))
    monkeypatch.setattr(activate, "HOOKS_MODULE", "spin_trtllm.no_such_module")
    monkeypatch.setattr(activate, "_outcomes", {})
    with caplog.at_level(logging.INFO, "spin_trtllm"):
        assert [install("json"), install("json")] == [False, False]
    assert len(caplog.records) == 1
    assert "has no hooks for TensorRT-LLM" in caplog.text
    assert issubclass(HookRefused, SpinError)


def test_when_imported_waits_for_a_module_on_its_way(site_folder: Path) -> None:
    """Hooks need modules that come later: V4's metadata imports the package of the indexer."""
    (site_folder / "early.py").write_text(
        "import spin_trtllm_activate as stub\n"
        "import sys\n"
        "seen = []\n"
        "note = lambda name: seen.append((name, hasattr(sys.modules[name], 'LATE')))\n"
        "stub.when_imported('early', note)\n"
        "stub.when_imported('early', note)\n"
        "LATE = True\n"
    )
    code = """
import spin_trtllm_activate as stub
stub.when_imported("early", lambda name: None)
import early, json
stub.when_imported("json", early.seen.append)
print(json.dumps(early.seen))
"""
    assert run(site_folder, code)[0] == [["early", True], "json"]


MODELING_UTILS = """
models = {}
def register_auto_model(name):
    def decorator(cls):
        models[name] = cls
        return cls
    return decorator
"""


def test_custom_module_dirs(site_folder: Path) -> None:
    """As TensorRT-LLM does it: the parent on the path, the folder imported by its name."""
    models = site_folder / "tensorrt_llm/_torch/models"
    models.mkdir()
    (models / "__init__.py").touch()
    (models / "modeling_utils.py").write_text(MODELING_UTILS)
    (models / "modeling_deepseekv4.py").write_text("class DeepseekV4ForCausalLM: ...\n")
    code = f"""{USE_FAKE_HOOKS}
import importlib, json, pickle, sys
spin_trtllm_activate = sys.modules.pop("spin_trtllm_activate", None)
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "spin_trtllm_activate"]
sys.path.insert(0, {str(PLUGIN.parent)!r})
importlib.import_module({PLUGIN.name!r})
import {NEW_TREE}, fake_hooks
from tensorrt_llm._torch.models.modeling_utils import models
(name, cls), = models.items()
print(json.dumps([
    fake_hooks.calls, name, cls.__name__, cls.__module__, pickle.loads(pickle.dumps(cls)) is cls,
]))
"""
    shown, log = run(site_folder, code)
    assert shown == [
        [[NEW_TREE, True, 0.25]],
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForCausalLM",
        PLUGIN.name,
        True,
    ]
    assert "SPIN does not reach ranks that serve DeepseekV32ForCausalLM" in log


def test_nothing_else_lies_beside_the_custom_module() -> None:
    """Its parent goes on `sys.path`: a file there would hide a module of the host."""
    beside = {path.name for path in PLUGIN.parent.iterdir()} - {"__pycache__"}
    assert beside == {PLUGIN.name}


def test_a_clone_on_the_path_has_the_stub_too() -> None:
    """No start-up file, no site-packages: the module that `--custom_module_dirs` names finds it."""
    code = (
        "import sys\n"
        "from spin_trtllm.hosts.trtllm.stub import load_stub\n"
        "stub = load_stub()\n"
        "assert load_stub() is stub is sys.modules['spin_trtllm_activate']\n"
        "print(stub.__file__)\n"
    )
    # An installation of this package, which the tests may run in, has the stub at top level.
    hide = "import sys; sys.modules['spin_trtllm_activate'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hide + code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == STARTUP / "spin_trtllm_activate.py"
