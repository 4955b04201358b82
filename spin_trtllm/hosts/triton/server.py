# SPDX-License-Identifier: Apache-2.0
"""Finds a tritonserver and the environment it needs, without changing any that exists.

One on PATH, as in NVIDIA's containers, is complete. The one inside the PyPI wheel `nvidia-pytriton`
has its parts in other places than it looks for them, and two peculiarities:

- Its stub, the process that runs a Python model, ignores PYTHONPATH. It takes the Python whose
  `python3` it finds first on PATH.
- It was built for numpy before 2 and reads nonsense from later ones.

So it gets a folder of its own: the backend with the stub for this Python, and a virtual environment
that is this one, with the numpy that lies beside the wheel put before it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import spin_trtllm
from spin_trtllm.errors import SpinError, refuse
from spin_trtllm.files import atomic_directory

PROGRAM = "tritonserver"
SERVER_VARIABLE = "SPIN_TRITONSERVER"
CACHE_VARIABLE = "XDG_CACHE_HOME"
WHEEL = "nvidia-pytriton"

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_STUB = "triton_python_backend_stub"
_FIRST_BAD_NUMPY = 2  # major version that the wheel's stub cannot read
_PLAIN = re.compile(r"[\w/.,+@%=-]*")


@dataclass(frozen=True)
class Server:
    """A tritonserver that can be started.

    Attributes:
        program: the binary.
        wheel: folder the wheel was installed into; None for a complete installation.
    """

    program: Path
    wheel: Path | None = None


def find_server(given: str | os.PathLike[str] | None = None) -> Server:
    """The server to start: the given one, one on PATH, or the wheel of this environment.

    Args:
        given: a tritonserver, or a folder that the wheel was installed into.

    Raises:
        SpinError: there is none.
    """
    if given is not None:
        path = Path(given)
        if path.is_dir():
            return _in_wheel(path) or refuse(
                "--tritonserver", str(path), f"a folder with {WHEEL} in it, or a {PROGRAM}"
            )
        if not os.access(path, os.X_OK):
            refuse("--tritonserver", str(path), f"a {PROGRAM} that can be run")
        return Server(path.resolve())
    on_path = shutil.which(PROGRAM)
    if on_path is not None:
        return Server(Path(on_path))
    spec = importlib.util.find_spec("pytriton")
    found = _in_wheel(Path(spec.origin).parent.parent) if spec and spec.origin else None
    if found is None:
        raise SpinError(
            f"{PROGRAM}: none on PATH and no {WHEEL} here, allowed: one of NVIDIA's containers, or "
            f"pip install --no-deps --target FOLDER {WHEEL} 'numpy<2', and --tritonserver FOLDER"
        )
    return found


def check_plain(name: str, path: Path) -> Path:
    """A path as it is, unless Triton's Python backend would break it.

    It writes the paths of models and of its stub into a shell command as they are. One with a space
    in it leaves a server that waits for ever, and other characters mean something to a shell.

    Raises:
        SpinError: a path with such a character.
    """
    if not _PLAIN.fullmatch(str(path)):
        refuse(name, str(path), "a path of letters, digits and _ / . , + @ % = -")
    return path


def missing(server: Server) -> Iterator[str]:
    """What a server lacks to run models in this Python, one line each with what to do."""
    if server.wheel is None:
        return
    if not _stub(server.wheel).is_file():
        has = sorted(path.name for path in _stub(server.wheel).parent.parent.iterdir())
        yield f"Python: got {_PYTHON}, allowed: {', '.join(has)}, which {WHEEL} has a stub for"
    version = _version("numpy", server.wheel)
    if version is None or int(version.partition(".")[0]) >= _FIRST_BAD_NUMPY:
        yield (
            f"numpy: got {version or 'none'} for the stub of {WHEEL}, allowed: 1.x: "
            f"pip install --no-deps --target {server.wheel} 'numpy<2'"
        )
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        yield f"Python: got one without libpython{_PYTHON}.so, allowed: one that has it"


def environment(server: Server, base: Mapping[str, str]) -> dict[str, str]:
    """The environment variables to start a server with.

    Args:
        base: the variables to add to.
    """
    if server.wheel is None:
        return dict(base)
    libraries = [
        str(server.wheel / "nvidia_pytriton.libs"),
        str(sysconfig.get_config_var("LIBDIR")),  # the stub's libpython
    ]
    added = {"PATH": str(_folder(server) / "bin"), "LD_LIBRARY_PATH": ":".join(libraries)}
    joined = {name: ":".join(filter(None, (text, base.get(name)))) for name, text in added.items()}
    return {**base, **joined}


def backend_arguments(server: Server) -> list[str]:
    """Arguments that tell a server where its Python backend is."""
    if server.wheel is None:
        return []
    return [f"--backend-directory={_folder(server) / 'backends'}"]


def prepare(server: Server) -> None:
    """Make the folder that a wheel's server needs, unless it is there already.

    Raises:
        SpinError: it cannot be written.
    """
    if server.wheel is None or (folder := _folder(server)).is_dir():
        return
    with atomic_directory(folder, force=True, argument=CACHE_VARIABLE) as made:
        _make_environment(made, server.wheel)
        backend = made / "backends" / "python"
        backend.mkdir(parents=True)
        for path in (_root(server.wheel) / "backends" / "python").glob("*triton*"):
            shutil.copy(path, backend)
        shutil.copy(_stub(server.wheel), backend)
        (backend / _STUB).chmod(0o755)


def _make_environment(folder: Path, wheel: Path) -> None:
    """A virtual environment over this one, whose numpy is the wheel's and whose SPIN is this."""
    (folder / "bin").mkdir()
    base = Path(sys.base_prefix) / "bin" / f"python{_PYTHON}"
    for name in ("python3", f"python{_PYTHON}"):
        (folder / "bin" / name).symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    packages = folder / "lib" / f"python{_PYTHON}" / "site-packages"
    packages.mkdir(parents=True)
    for path in (*wheel.glob("numpy"), *wheel.glob("numpy.libs"), *wheel.glob("numpy-*")):
        (packages / path.name).symlink_to(path)
    (packages / "spin_trtllm").symlink_to(Path(spin_trtllm.__file__).parent)
    # Not only on sys.path: what this environment's own .pth files do is a part of it.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _site_packages()]
    (packages / "this_environment.pth").write_text("".join(lines))


def _site_packages() -> list[str]:
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [path for path in (*user, *site.getsitepackages()) if os.path.isdir(path)]


def _folder(server: Server) -> Path:
    """Where the folder of a server and this environment is; the same for the same of both."""
    # Versions, too: a later wheel in the same folder needs its own backend.
    versions = (_version(WHEEL, server.wheel), _version("numpy", server.wheel))
    parts = (server.wheel, *versions, sys.base_prefix, spin_trtllm.__file__, *_site_packages())
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogateescape"))
    name = f"triton-py{_PYTHON}-{digest.hexdigest()[:12]}"
    return check_plain(CACHE_VARIABLE, _cache() / "spin-trtllm" / name)


def _cache() -> Path:
    given = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(given).absolute() if given else Path.home() / ".cache"
    except RuntimeError:
        refuse(CACHE_VARIABLE, given, "a folder that can be written, where there is no home")


def _in_wheel(folder: Path) -> Server | None:
    program = _root(folder) / "bin" / PROGRAM
    return Server(program.resolve(), folder.resolve()) if program.is_file() else None


def _root(wheel: Path) -> Path:
    return wheel / "pytriton" / PROGRAM


def _stub(wheel: Path) -> Path:
    return _root(wheel) / "python_backend_stubs" / _PYTHON / _STUB


def _version(package: str, wheel: Path | None) -> str | None:
    """Version of a package beside a wheel, or else in this environment."""
    beside = [] if wheel is None else [str(wheel)]
    for path in (*beside, *_site_packages()):
        found = list(importlib.metadata.distributions(name=package, path=[path]))
        if found:
            return found[0].version
    return None
