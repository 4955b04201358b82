# SPDX-License-Identifier: Apache-2.0
"""SPIN behind Triton Inference Server, through its Python backend.

    config.pbtxt, model.yaml   what trtllm-build writes (`spin_trtllm.build.triton`)
    backend.py                 what Triton calls: tensors in, tensors out
    request.py, reply.py       one request and its answers, without Triton
    llm_api.py                 engine `tensorrt_llm`: TensorRT-LLM's LLM API with SPIN's hooks
    embedded.py                engine `transformers`: the embedded host, one step at a time
    server.py                  how to start a tritonserver, the one inside a PyPI wheel included

Tensors and their meaning are those of TensorRT-LLM's own `llmapi` model, so that clients written
for it work unchanged; `docs/triton.md` lists where this one differs.
"""
