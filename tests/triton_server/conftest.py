# SPDX-License-Identifier: Apache-2.0
"""One real server for all tests of this folder, with two models of a small random checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import CONFIG, MAX_TOKENS, Direct, byte_tokenizer

from spin_trtllm.build.cli import main as trtllm_build
from spin_trtllm.errors import SpinError
from spin_trtllm.hosts.triton.running import RunningServer, running_server
from spin_trtllm.hosts.triton.server import SERVER_VARIABLE, find_server, missing

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that takes a few milliseconds a token; a token is a byte."""
    pytest.importorskip("transformers")
    from tiny_models import tiny_model

    folder = tmp_path_factory.mktemp("triton") / "checkpoint"
    model = tiny_model(vocab_size=272, bos_token_id=256, eos_token_id=None)  # no early ends
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def repository(checkpoint: Path) -> Path:
    """A model repository: `tensorrt_llm` answers once, `stream` streams."""
    folder = checkpoint.parent / "repository"
    spin = checkpoint.parent / "spin.yaml"
    spin.write_text(CONFIG.to_yaml())
    for name, *more in (("tensorrt_llm",), ("stream", "--triton_streaming")):
        with pytest.raises(SystemExit) as stopped:
            trtllm_build(
                [
                    *(
                        "--use_spin",
                        "--checkpoint_dir",
                        str(checkpoint),
                        "--spin_config",
                        str(spin),
                    ),
                    *("--output_dir", str(checkpoint.parent / f"engine-{name}")),
                    *("--max_seq_len", str(MAX_TOKENS), "--target_sm", "90"),
                    *("--triton", str(folder), "--triton_name", name),
                    *("--triton_engine", "transformers", *more),
                ]
            )
        assert stopped.value.code == 0
    return folder


@pytest.fixture(scope="session")
def tritonserver() -> str | None:
    """Which server to start; skips, with the reason, where there is none."""
    pytest.importorskip("tritonclient.grpc")
    pytest.importorskip("tritonclient.http")
    setup = ROOT / ".venv" / "triton"  # where `make setup` puts the wheel
    given = os.environ.get(SERVER_VARIABLE) or (str(setup) if setup.is_dir() else None)
    try:
        lacks = list(missing(find_server(given)))
    except SpinError as error:
        lacks = [str(error)]
    if lacks:
        pytest.skip(lacks[0])
    return given


@pytest.fixture(scope="session")
def server(
    repository: Path, tritonserver: str | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The server, with a cache of its own. Tests leave both models loaded."""
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with running_server(repository, log=folder / "log", tritonserver=tritonserver) as running:
            yield running


@pytest.fixture(scope="session")
def direct(checkpoint: Path) -> Iterator[Direct]:
    """The same model in this process."""
    with Direct(checkpoint) as direct:
        yield direct
