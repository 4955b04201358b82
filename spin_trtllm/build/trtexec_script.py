# SPDX-License-Identifier: Apache-2.0
"""The text of `build_engines.sh`: the commands that build engines where only TensorRT is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Options as of TensorRT 10.3 and later.
_TEMPLATE = """\
#!/bin/sh
# Build the engines of this folder with TensorRT's trtexec, on the kind of GPU that is to serve;
# further arguments go to trtexec. What is there already stays, and an engine has its name only once
# it is whole. Without the plugin or networks it exits with 2.
set -eu

folder=$(dirname -- "$(readlink -f -- "$0")")
plugin=$folder/{plugin}
if ! test -f "$plugin"; then
    echo "${{0##*/}}: $plugin: not there; build it with \\`make plugin\\` and put it there" >&2
    exit 2
fi

for network in "$folder"/layer_*.onnx; do
    if ! test -e "$network"; then
        echo "${{0##*/}}: $network: not there; trtllm-build --use_spin --tensorrt writes it" >&2
        exit 2
    fi
    engine=${{network%.onnx}}.engine
    test -e "$engine" && continue
    trtexec --onnx="$network" --saveEngine="$engine.part" --staticPlugins="$plugin" \\
        --skipInference --stronglyTyped --noTF32 --preview=+aliasedPluginIO1003 \\
        --minShapes={least} \\
        --optShapes={usual} \\
        --maxShapes={most} "$@"
    mv -- "$engine.part" "$engine"
done
"""

Shapes = Mapping[str, Sequence[int | str]]


def trtexec_script_text(
    plugin: str, shapes: Shapes, ranges: Mapping[str, tuple[int, int, int]]
) -> str:
    """The shell script.

    Args:
        plugin: file name of the plugin library.
        shapes: of every input with a named dimension, the same in all networks.
        ranges: least, usual and largest value of each named dimension.
    """
    least, usual, most = (
        ",".join(f"{name}:{_spell(shape, ranges, which)}" for name, shape in shapes.items())
        for which in range(3)
    )
    return _TEMPLATE.format(plugin=plugin, least=least, usual=usual, most=most)


def _spell(
    shape: Sequence[int | str], ranges: Mapping[str, tuple[int, int, int]], which: int
) -> str:
    """`4x1x128`."""
    return "x".join(str(ranges[n][which] if isinstance(n, str) else n) for n in shape)
