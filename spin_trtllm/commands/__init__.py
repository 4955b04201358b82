# SPDX-License-Identifier: Apache-2.0
"""One module a subcommand of `spin-trtllm`, each holding a click command named `command`."""
