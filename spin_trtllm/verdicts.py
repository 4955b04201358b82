# SPDX-License-Identifier: Apache-2.0
"""What a probe's report means: which uses of SPIN work here, and how to fix the others."""

from __future__ import annotations

from dataclasses import dataclass

from spin_trtllm.hosts.tensorrt.flavours import FLAVOURS
from spin_trtllm.probe import ENGINE_BUILDER, TRITON_SERVER, Report

_GPU = "run on a Hopper or Blackwell GPU"
_NO_HOOKS = "install TensorRT-LLM 1.3.0rc27 .. 1.4.0rc4, which the hooks are made for"
_TRITON = "docs/triton.md says where to get a server, and what its Python backend needs"
_MINIMUM_SM = 90  # the kernels use clusters
_PLUGIN = "make plugin in a clone, or reinstall spin-trtllm from source; both need nvcc"
_TENSORRT = "pip install 'tensorrt>=10.3'"
_TENSORRT_RUNTIMES = ("tensorrt", "tensorrt_lean", "tensorrt_dispatch")
_KERNELS = "make kernels in a clone, or reinstall spin-trtllm from source; both need nvcc"

_STARTUP = "install spin-trtllm in this environment: pip install, not PYTHONPATH"


@dataclass(frozen=True)
class Verdict:
    """Whether one use of SPIN works here.

    Attributes:
        use: what one would do.
        runs: whether it works.
        why: the reason, one line.
        fix: what to do about it, one line; empty if nothing is to be done.
    """

    use: str
    runs: bool
    why: str
    fix: str = ""


def verdicts(report: Report) -> tuple[Verdict, ...]:
    """What runs here, what does not, and how to fix it."""
    return (
        Verdict("trtllm-build --use_spin", True, "needs no host"),
        _own_build(report),
        _embedded(report),
        _kernels(report),
        _trtllm_serve(report),
        _tensorrt_build(report),
        _tensorrt_plugin(report),
        _triton(report),
    )


def _own_build(report: Report) -> Verdict:
    use = "trtllm-build without --use_spin"
    if report.has_own_build:
        return Verdict(use, True, "TensorRT-LLM's own command is there")
    why = "TensorRT-LLM's own command is not there; releases after 1.3.0rc22 have none"
    return Verdict(use, False, why, "use trtllm-build --use_spin for DeepSeek-V4")


def _embedded(report: Report) -> Verdict:
    use = "embedded host (spin-trtllm generate)"
    host = report.host("transformers")
    install = "pip install 'spin-trtllm[transformers]'"
    if not host.found:
        return Verdict(use, False, "transformers is not installed", install)
    if not host.matches:
        why = f"transformers {host.version} has no DeepSeek-V4 indexer that SPIN knows"
        return Verdict(use, False, why, install)
    return Verdict(use, True, f"transformers {host.version}, both hook points match")


def _kernels(report: Report) -> Verdict:
    use = "CUDA kernels"
    if not report.devices:
        return Verdict(use, False, "no CUDA device; the reference runs on the CPU", _GPU)
    sms = sorted({device.sm for device in report.devices if device.sm >= _MINIMUM_SM})
    if not sms:
        return Verdict(use, False, f"no GPU of sm_{_MINIMUM_SM} or later", _GPU)
    if not report.kernel_library.found:
        return Verdict(use, False, report.kernel_library.note, _KERNELS)
    return Verdict(use, True, f"on {', '.join(f'sm_{sm}' for sm in sms)}")


def _trtllm_serve(report: Report) -> Verdict:
    use = "trtllm-serve with SPIN"
    host = report.host("tensorrt_llm")
    if not host.found:
        return Verdict(use, False, "tensorrt_llm is not installed", _NO_HOOKS)
    if not host.matches:
        why = f"tensorrt_llm {host.version}: {host.hooks[0].name} {host.hooks[0].note}"
        return Verdict(use, False, why, _NO_HOOKS)
    has = f"tensorrt_llm {host.version} has the hook point"
    if not report.activation.has_hooks:
        return Verdict(use, False, f"{has}; this version does not use it yet", _NO_HOOKS)
    kernels = _kernels(report)
    if not kernels.runs:
        return Verdict(use, False, f"{has}, but the kernels: {kernels.why}", kernels.fix)
    if report.activation.startup_file is None:
        return Verdict(use, False, f"{has}, but no start-up file reaches its ranks", _STARTUP)
    return Verdict(use, True, f"{has}; never run under a real TensorRT-LLM so far")


def _tensorrt_build(report: Report) -> Verdict:
    use = "trtllm-build --use_spin --tensorrt"
    if not report.host("onnx").found:
        return Verdict(use, False, "onnx is not installed", "pip install onnx")
    hosts = [host for f in FLAVOURS if f.builds and (host := report.host(f.name)).found]
    builders = [host.name for host in hosts if host.matches]
    if builders:
        return Verdict(use, True, f"ONNX; engines by {' or '.join(builders)}")
    reasons = [str(host.fault()) for host in hosts] or ["no builder here"]
    return Verdict(use, True, f"ONNX only: {'; '.join(reasons)}")


def _tensorrt_plugin(report: Report) -> Verdict:
    use = "TensorRT plugin"
    if not report.tensorrt_plugin.found:
        return Verdict(use, False, report.tensorrt_plugin.note, _PLUGIN)
    hosts = [host for name in _TENSORRT_RUNTIMES if (host := report.host(name)).found]
    if not hosts:
        return Verdict(use, False, f"none of {', '.join(_TENSORRT_RUNTIMES)} is here", _TENSORRT)
    runtimes = [host for host in hosts if host.fault(ENGINE_BUILDER) is None]
    if not runtimes:
        reasons = [str(host.fault(ENGINE_BUILDER)) for host in hosts]
        return Verdict(use, False, "; ".join(reasons), _TENSORRT)
    if all(device.sm < _MINIMUM_SM for device in report.devices):
        return Verdict(use, False, f"it loads, but no GPU of sm_{_MINIMUM_SM} or later", _GPU)
    shown = f"{runtimes[0].name} {runtimes[0].version or ''}".rstrip()
    return Verdict(use, True, f"{shown}; never run in TensorRT itself so far")


def _triton(report: Report) -> Verdict:
    use = "Triton Inference Server"
    host = report.host(TRITON_SERVER)
    if not host.found:
        return Verdict(use, False, "no tritonserver is here", _TRITON)
    fault = host.fault()
    if fault is not None:
        return Verdict(use, False, fault, _TRITON)
    engines = {"tensorrt_llm": _trtllm_serve(report), "transformers": _embedded(report)}
    running = [name for name, engine in engines.items() if engine.runs]
    if not running:
        embedded = engines["transformers"]
        return Verdict(use, False, f"it has no engine: {embedded.why}", embedded.fix)
    return Verdict(use, True, f"spin-trtllm triton; engine {' or '.join(running)}")
