# SPDX-License-Identifier: Apache-2.0
"""SPIN in TensorRT 10.3 to 11.x: the plugin loaded, its nodes in a network, an indexer network.

    plugin = load_plugin()                        # into the registry of the TensorRT that is there
    outputs = add_node(network, plugin, "SpinIndexer", inputs, fields)
    allow_aliasing(builder_config, plugin.tensorrt)

`plugins/tensorrt/README.md` has the nodes, `docs/tensorrt.md` how to build, bind and run them.
"""

from spin_trtllm.hosts.tensorrt.flavours import (
    FLAVOURS,
    Flavour,
    import_flavour,
    installed_flavours,
)
from spin_trtllm.hosts.tensorrt.indexer import (
    PRECISIONS,
    indexer_network,
)
from spin_trtllm.hosts.tensorrt.network import add_node, allow_aliasing
from spin_trtllm.hosts.tensorrt.nodes import NODES, Node, node_fields
from spin_trtllm.hosts.tensorrt.onnx_nodes import make_onnx_node
from spin_trtllm.hosts.tensorrt.plugin import Plugin, load_plugin, plugin_path
from spin_trtllm.hosts.tensorrt.rope import Rope, indexer_rope
from spin_trtllm.hosts.tensorrt.sizes import IndexerSizes, state_shapes
from spin_trtllm.hosts.tensorrt.weights import IndexerWeights, read_indexer_weights

__all__ = [
    "FLAVOURS",
    "NODES",
    "PRECISIONS",
    "Flavour",
    "IndexerSizes",
    "IndexerWeights",
    "Node",
    "Plugin",
    "Rope",
    "add_node",
    "allow_aliasing",
    "import_flavour",
    "indexer_network",
    "indexer_rope",
    "installed_flavours",
    "load_plugin",
    "make_onnx_node",
    "node_fields",
    "plugin_path",
    "read_indexer_weights",
    "state_shapes",
]
