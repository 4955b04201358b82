# SPDX-License-Identifier: Apache-2.0
"""The build itself: a few stages, each a function of what the ones before it found."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from spin_trtllm.build.checkpoint import Checkpoint, read_checkpoint
from spin_trtllm.build.engine import (
    CONFIG_FILE,
    LLM_ARGS_FILE,
    RUN_FILE,
    SPIN_FILE,
    engine_config_text,
)
from spin_trtllm.build.fields import integer
from spin_trtllm.build.llm_args import llm_args_text
from spin_trtllm.build.memory import SpinMemory, human_bytes, spin_memory
from spin_trtllm.build.output import check_output_dir, write_output
from spin_trtllm.build.progress import Stages
from spin_trtllm.build.run_script import run_script_text
from spin_trtllm.build.spin_settings import settle_spin
from spin_trtllm.build.target import Target, choose_target, indexer_key_dtype
from spin_trtllm.build.tensorrt import (
    TensorrtOptions,
    describe_networks,
    export_networks,
    folder_texts,
    move_into,
    size_networks,
)
from spin_trtllm.build.tensorrt_engines import (
    Engines,
    Network,
    describe_engines,
    drop_engines,
    make_engines,
    work_folder,
)
from spin_trtllm.build.triton import TritonOptions, check_model_dir, model_files, write_model
from spin_trtllm.config import SpinConfig
from spin_trtllm.hosts.tensorrt.plugin import usable_plugin
from spin_trtllm.hosts.tensorrt.sizes import IndexerSizes


@dataclass(frozen=True)
class BuildRequest:
    """What the command line asks for; None is "not given".

    Attributes:
        checkpoint_dir: the model to serve.
        output_dir: where the engine goes.
        spin_config: YAML file of SPIN fields.
        spin_preset: name of a preset; without it and `spin_config`, the checkpoint decides.
        overrides: single SPIN fields, by name.
        target_sm: GPU architecture, such as `90` or `sm_100a`.
        max_batch_size: sequences that decode at once.
        max_seq_len: longest sequence in tokens; None takes the model's limit.
        dry_run: do everything but write.
        force: replace an earlier engine.
        tensorrt: also make TensorRT networks, and engines where they can be built; None does not.
        triton: also write a model for Triton Inference Server; None does not.
    """

    checkpoint_dir: str
    output_dir: str
    spin_config: str | None
    spin_preset: str | None
    overrides: Mapping[str, Any]
    target_sm: str | None
    max_batch_size: int
    max_seq_len: int | None
    dry_run: bool
    force: bool
    tensorrt: TensorrtOptions | None = None
    triton: TritonOptions | None = None

    @property
    def stages(self) -> int:
        """How many stages the build has."""
        return 5 + 2 * (self.tensorrt is not None) + (self.triton is not None)


@dataclass(frozen=True)
class Built:
    """What a build made.

    Attributes:
        output: the engine's directory.
        files: the text of its files by name.
        engines: what became of TensorRT engines, if they were asked for.
        model_files: the text of Triton's files by name, if they were asked for.
    """

    output: Path
    files: Mapping[str, str]
    engines: Engines | None
    model_files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """What an engine is sized for, and the memory that takes; `networks` are TensorRT's."""

    max_batch_size: int
    max_seq_len: int
    target: Target
    key_dtype: str
    memory: SpinMemory
    networks: IndexerSizes | None


def build(request: BuildRequest, stages: Stages) -> Built:
    """Build an engine, or only work it out for a dry run.

    Raises:
        SpinError: the first check that failed; nothing has been written then.
    """
    checkpoint = stages.run(
        "read checkpoint", lambda: read_checkpoint(request.checkpoint_dir), _describe_checkpoint
    )
    config, _ = stages.run("settle SPIN", lambda: _settle(request, checkpoint), _describe_spin)
    sizes = stages.run("size state", lambda: _size(request, checkpoint, config), _describe_sizes)
    files = stages.run("render files", lambda: _render(checkpoint, config, sizes), ", ".join)
    output = Path(os.path.realpath(request.output_dir))
    if request.triton is None:
        return _build_engine(request, stages, checkpoint, config, sizes, output, files)
    others = (output, checkpoint.path)
    check_model_dir(request.triton, others, force=request.force)  # before anything is written
    built = _build_engine(request, stages, checkpoint, config, sizes, output, files)
    return _add_model(request, request.triton, stages, checkpoint, config, built)


def _build_engine(
    request: BuildRequest,
    stages: Stages,
    checkpoint: Checkpoint,
    config: SpinConfig,
    sizes: Sizes,
    output: Path,
    files: Mapping[str, str],
) -> Built:
    options, room = request.tensorrt, sizes.networks
    if options is None or room is None:
        _write_stage(request, stages, checkpoint, output, files)
        return Built(output, files, None)
    check_output_dir(output, checkpoint.path, force=request.force)  # before minutes of work
    plugin = usable_plugin()  # likewise

    def engines_of(networks: list[Network]) -> Engines:
        if request.dry_run:
            return Engines(None, "a dry run")
        if options.onnx_only:
            return Engines(None, "as asked by --onnx_only")
        return make_engines(networks, room, sizes.target, plugin)

    with nullcontext() if request.dry_run else work_folder(output) as work:
        networks = stages.run(
            "export networks",
            lambda: export_networks(checkpoint, config, room, options, work),
            lambda networks: describe_networks(networks, config, room, options),
        )
        engines = stages.run("build engines", lambda: engines_of(networks), describe_engines)
        texts = folder_texts(networks, engines, config, room, options, plugin)
        then = None if work is None else partial(move_into, work, networks, engines, texts, plugin)
        _write_stage(request, stages, checkpoint, output, files, then)
        if work is not None:
            drop_engines(work, engines)
    return Built(output, files, engines)


def _settle(request: BuildRequest, checkpoint: Checkpoint) -> tuple[SpinConfig, str]:
    return settle_spin(
        checkpoint,
        file=request.spin_config,
        preset_name=request.spin_preset,
        overrides=request.overrides,
    )


def _size(request: BuildRequest, checkpoint: Checkpoint, config: SpinConfig) -> Sizes:
    limit = checkpoint.max_position_tokens
    asked = {"max_batch_size": request.max_batch_size, "max_seq_len": request.max_seq_len}
    if request.max_seq_len is None:
        asked["max_seq_len"] = limit
    max_batch_size = integer(asked, "max_batch_size", 1, 65536)
    max_seq_len = integer(asked, "max_seq_len", 1, limit)
    target = choose_target(request.target_sm)
    geometry = checkpoint.geometry
    key_dtype = indexer_key_dtype(target.sm, checkpoint.architecture, geometry.index_head_dim)
    memory = spin_memory(
        geometry,
        config,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        key_dtype=key_dtype,
    )
    networks = None
    if request.tensorrt is not None:
        networks = size_networks(
            checkpoint,
            config,
            request.tensorrt,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
        )
    return Sizes(max_batch_size, max_seq_len, target, key_dtype, memory, networks)


def _render(checkpoint: Checkpoint, config: SpinConfig, sizes: Sizes) -> dict[str, str]:
    return {
        CONFIG_FILE: engine_config_text(
            checkpoint=checkpoint,
            config=config,
            memory=sizes.memory,
            max_batch_size=sizes.max_batch_size,
            max_seq_len=sizes.max_seq_len,
            target_sm=sizes.target.sm,
        ),
        SPIN_FILE: "# SPIN's settings; run.sh names this file in TLLM_SPIN.\n" + config.to_yaml(),
        LLM_ARGS_FILE: llm_args_text(
            checkpoint,
            sizes.target,
            sizes.memory,
            block_size_slots=config.block_size,
            max_batch_size=sizes.max_batch_size,
            max_seq_len=sizes.max_seq_len,
        ),
        RUN_FILE: run_script_text(checkpoint),
    }


def _write_stage(
    request: BuildRequest,
    stages: Stages,
    checkpoint: Checkpoint,
    output: Path,
    files: Mapping[str, str],
    then: Callable[[Path], None] | None = None,
) -> None:
    def write() -> None:
        check_output_dir(output, checkpoint.path, force=request.force)
        if not request.dry_run:
            write_output(output, files, force=request.force, then=then)

    stages.run(
        "write engine",
        write,
        lambda _: f"{str(output)!r}" + (" (dry run: not written)" if request.dry_run else ""),
    )


def _add_model(
    request: BuildRequest,
    options: TritonOptions,
    stages: Stages,
    checkpoint: Checkpoint,
    config: SpinConfig,
    built: Built,
) -> Built:
    files = model_files(options, checkpoint, config, built.files[LLM_ARGS_FILE])

    def write() -> None:
        if not request.dry_run:
            write_model(options, files, force=request.force)

    stages.run(
        "write Triton model",
        write,
        lambda _: (
            f"{str(options.folder)!r}" + (" (dry run: not written)" if request.dry_run else "")
        ),
    )
    return replace(built, model_files=files)


def _describe_checkpoint(checkpoint: Checkpoint) -> str:
    geometry = checkpoint.geometry
    return (
        f"{checkpoint.architecture}, {len(geometry.layers)} of {checkpoint.num_layers} layers "
        f"with an indexer of {geometry.index_heads} heads x {geometry.index_head_dim}, "
        f"{geometry.ratio} tokens a slot, top-k {geometry.top_k}, "
        f"weight files: {checkpoint.weight_files}"
    )


def _describe_spin(settled: tuple[SpinConfig, str]) -> str:
    config, source = settled
    explored = config.exploration if config.exploration_policy != "none" else 0
    return (
        f"{source}: sparsity {config.sparsity_text}, blocks of {config.block_size} slots, "
        f"decay {config.ema_decay}, exploration {explored}, {config.state_dtype} averages"
    )


def _describe_sizes(sizes: Sizes) -> str:
    memory = sizes.memory
    return (
        f"{human_bytes(memory.total_bytes)} for {sizes.max_batch_size} sequences of "
        f"{sizes.max_seq_len} tokens, averages of {human_bytes(memory.per_sequence_bytes)} each: "
        f"{memory.share_of_indexer_cache:.1%} of its {sizes.key_dtype} indexer keys on "
        f"{sizes.target.name} ({sizes.target.source})"
    )
