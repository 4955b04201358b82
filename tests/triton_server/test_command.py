# SPDX-License-Identifier: Apache-2.0
"""`spin-trtllm triton`: which server it takes, what it needs, and the command that it becomes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spin_trtllm import cli
from spin_trtllm.commands import triton as command
from spin_trtllm.hosts.triton import server as module
from spin_trtllm.hosts.triton.server import environment, find_server, missing, prepare

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server anywhere, and a cache of the test's own."""
    monkeypatch.delenv("SPIN_TRITONSERVER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.sysconfig, "get_config_var", config_var)


def config_var(name: str) -> object:
    return {"Py_ENABLE_SHARED": 1, "LIBDIR": "/python/lib"}.get(name)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "tensorrt_llm").mkdir(parents=True)
    (folder / "tensorrt_llm" / "config.pbtxt").touch()
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A folder as `pip install --target` leaves it: the files that are used, and no others."""
    folder = tmp_path / "wheel"
    root = folder / "pytriton" / "tritonserver"
    script(root / "bin" / "tritonserver", 'echo "args: $*"; echo "$LD_LIBRARY_PATH"; exit 3')
    for version in (PYTHON, "2.7"):
        script(root / "python_backend_stubs" / version / "triton_python_backend_stub", version)
    (root / "backends" / "python").mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (root / "backends" / "python" / name).write_text(name)
    numpy = folder / "numpy-1.26.4.dist-info"
    numpy.mkdir()
    (numpy / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.26.4\n")
    (folder / "numpy").mkdir()
    (folder / "numpy" / "__init__.py").write_text("__version__ = '1.26.4'\n")
    return folder


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def run(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["triton", *map(str, words)])
    return stopped.value.code, *capfd.readouterr()


def test_the_command_listens_on_loopback_only(
    capfd: pytest.CaptureFixture[str], repository: Path, wheel: Path, tmp_path: Path
) -> None:
    code, out, err = run(capfd, repository, "--tritonserver", wheel, "--dry_run", "--", "--id=x")
    assert (code, err) == (0, "")
    (cached,) = [word for word in out.split() if word.startswith("--backend-directory=")]
    assert cached.startswith(f"--backend-directory={tmp_path}/cache/spin-trtllm/triton-py{PYTHON}-")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        assert f" --{name}-address=127.0.0.1 --{name}-port={port} " in out
    assert f" --model-repository={repository} " in out
    assert out.endswith(" --id=x\n")
    assert f"LD_LIBRARY_PATH={wheel}/nvidia_pytriton.libs:/python/lib" in out
    assert not (tmp_path / "cache").exists()


def test_it_becomes_the_server(repository: Path, wheel: Path, tmp_path: Path) -> None:
    """In a process of its own, with signals and exit code the server's."""
    words = [sys.executable, "-m", "spin_trtllm.cli", "triton", str(repository)]
    done = subprocess.run(
        [*words, "--tritonserver", str(wheel), "--http_port", "1234"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PATH": os.defpath},
    )
    if "one that has it" in done.stderr:
        pytest.skip("this Python has no shared library")
    assert done.returncode == 3, done.stderr
    shown, arguments, libraries = done.stdout.splitlines()
    assert arguments.startswith(f"args: --model-repository={repository} ")
    assert "--http-port=1234" in arguments
    assert arguments.removeprefix("args: ").split()[0] in shown
    assert libraries.startswith(f"{wheel}/nvidia_pytriton.libs:")


@pytest.mark.parametrize("given", ["folder", "variable", "wheel", "path", "binary"])
def test_which_server_is_taken(
    given: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = wheel / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    if given == "path":
        script(tmp_path / "bin" / "tritonserver", "")
        found = find_server()
        assert (found.program, found.wheel) == (tmp_path / "bin" / "tritonserver", None)
        assert list(missing(found)) == []
        assert environment(found, {"A": "b"}) == {"A": "b"}
        return
    if given == "binary":
        assert find_server(program).wheel is None
        return
    if given == "wheel":
        spec = type("Spec", (), {"origin": str(wheel / "pytriton" / "__init__.py")})
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: spec)
    found = find_server(None if given == "wheel" else wheel)
    assert (found.program, found.wheel) == (program, wheel)
    assert list(missing(found)) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "tritonserver: none on PATH and no nvidia-pytriton here, allowed: "),
        (["--tritonserver", "."], "--tritonserver: got '.', allowed: a folder with nvidia-pyt"),
        (["--tritonserver", "no"], "--tritonserver: got 'no', allowed: a tritonserver that can"),
    ],
)
def test_no_server(
    capfd: pytest.CaptureFixture[str], repository: Path, words: list[str], line: str
) -> None:
    code, _, err = run(capfd, repository, *words)
    assert code == 2
    assert line in err
    assert err.count("\n") == 1


def test_no_repository(capfd: pytest.CaptureFixture[str], wheel: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        code, _, err = run(capfd, folder, "--tritonserver", wheel)
        assert code == 2
        assert "allowed: a directory that trtllm-build --triton wrote" in err


@pytest.mark.parametrize(
    ("lack", "line"),
    [
        ("stub", f"Python: got {PYTHON}, allowed: 2.7, which nvidia-pytriton has a stub for"),
        ("numpy", "for the stub of nvidia-pytriton, allowed: 1.x: pip install --no-deps --target"),
        (
            "library",
            f"Python: got one without libpython{PYTHON}.so, allowed: one that has it",
        ),
    ],
)
def test_what_is_missing_is_said_and_not_started(
    lack: str,
    line: str,
    capfd: pytest.CaptureFixture[str],
    repository: Path,
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if lack == "stub":
        shutil.rmtree(wheel / "pytriton" / "tritonserver" / "python_backend_stubs" / PYTHON)
    elif lack == "numpy":
        shutil.rmtree(wheel / "numpy-1.26.4.dist-info")
        monkeypatch.setattr(module, "_site_packages", list)
    else:
        monkeypatch.setattr(module.sysconfig, "get_config_var", lambda name: None)
    code, _, err = run(capfd, repository, "--tritonserver", wheel)
    assert code == 2
    assert line in err
    code, out, err = run(capfd, repository, "--tritonserver", wheel, "--dry_run")
    assert code == 0
    assert f"missing here: {line}" in err or line in err
    assert "--model-repository=" in out


def said_by_the_stubs_python(variables: dict[str, str], code: str) -> str:
    """As the stub runs: without PYTHONPATH, and with what is found first on PATH."""
    python = shutil.which("python3", path=variables["PATH"])
    assert python is not None
    said = subprocess.run(
        [python, "-I", "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": variables["PATH"]},
    )
    assert said.returncode == 0, said.stderr
    return said.stdout.strip()


def test_the_servers_python_is_this_one_with_the_wheels_numpy(wheel: Path, tmp_path: Path) -> None:
    server = find_server(wheel)
    prepare(server)
    (folder,) = (tmp_path / "cache" / "spin-trtllm").iterdir()
    backend = folder / "backends" / "python"
    assert {path.name for path in backend.iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
        "triton_python_backend_stub",
    }
    assert PYTHON in (backend / "triton_python_backend_stub").read_text()
    assert os.access(backend / "triton_python_backend_stub", os.X_OK)

    variables = environment(server, {"PATH": "/usr/bin"})
    assert variables["PATH"] == f"{folder}/bin:/usr/bin"
    assert said_by_the_stubs_python(variables, "import numpy; print(numpy.__version__)") == "1.26.4"

    before = backend.stat().st_mtime_ns
    prepare(server)  # a second start finds it ready
    assert backend.stat().st_mtime_ns == before


def test_the_servers_python_finds_this_package(wheel: Path, tmp_path: Path) -> None:
    server = find_server(wheel)
    prepare(server)
    code = "import click, importlib.util as u; print(u.find_spec('spin_trtllm').origin)"
    found = said_by_the_stubs_python(environment(server, {"PATH": "/usr/bin"}), code)
    assert Path(found).resolve() == Path(module.spin_trtllm.__file__).resolve()


def test_a_cache_that_cannot_be_written(
    capfd: pytest.CaptureFixture[str],
    repository: Path,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, _, err = run(capfd, repository, "--tritonserver", wheel)
    assert code == 2
    assert "XDG_CACHE_HOME: cannot " in err


def test_no_home(
    capfd: pytest.CaptureFixture[str],
    repository: Path,
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(module.Path, "home", none)
    code, _, err = run(capfd, repository, "--tritonserver", wheel)
    assert (code, err.count("\n")) == (2, 1)
    assert "XDG_CACHE_HOME: got None, allowed: a folder that can be written" in err


@pytest.mark.parametrize("name", ["my models", "a;b", "$(x)", "a'b", "a\nb", "a&b", "*"])
def test_paths_that_the_python_backend_breaks(
    name: str,
    capfd: pytest.CaptureFixture[str],
    repository: Path,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a space in it the real server waits for ever; the others are for its shell to run."""
    odd = repository.rename(tmp_path / name)
    code, out, err = run(capfd, odd, "--tritonserver", wheel, "--dry_run")
    assert (code, out) == (2, "")
    assert "repository: got " in err
    monkeypatch.setenv("XDG_CACHE_HOME", str(odd))
    plain = odd.rename(tmp_path / "größe_1.5,+@%=-x")
    code, _, err = run(capfd, plain, "--tritonserver", wheel, "--dry_run")
    assert code == 2
    assert "XDG_CACHE_HOME: got " in err


def test_another_wheel_in_the_same_folder_gets_its_own_backend(wheel: Path, tmp_path: Path) -> None:
    prepare(find_server(wheel))
    for version in ("0.7.0", "0.7.1"):
        metadata = wheel / "nvidia_pytriton.dist-info" / "METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: {version}\n")
        prepare(find_server(wheel))
    assert len(list((tmp_path / "cache" / "spin-trtllm").iterdir())) == 3


def test_ports_that_cannot_be_had(
    capfd: pytest.CaptureFixture[str],
    repository: Path,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found before the models are loaded, which takes minutes."""
    monkeypatch.setattr(command, "_become", lambda words, variables: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run(capfd, repository, "--tritonserver", wheel, "--grpc_port", port)
    assert code == 2
    assert f"--grpc_port: cannot listen on 127.0.0.1:{port}: Address already in use" in err
    words = ["--http_port", port, "--grpc_port", port]
    code, _, err = run(capfd, repository, "--tritonserver", wheel, *words)
    assert code == 2
    assert f"--grpc_port: cannot listen on 127.0.0.1:{port}" in err
    for port in (-1, 0, 65536):
        code, _, err = run(capfd, repository, "--tritonserver", wheel, "--http_port", port)
        assert code == 2
        assert "is not in the range 1<=x<=65535" in err
    code, _, err = run(capfd, repository, "--tritonserver", wheel, "--host", "192.0.2.1")
    assert code == 2
    assert "--http_port: cannot listen on 192.0.2.1:8000: " in err
    assert not (tmp_path / "cache").exists()
