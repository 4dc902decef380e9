"""llama.cpp's results for one GGUF file. `gguf_check.py` runs this file in a python that has xllamacpp.

    python gguf_worker.py JOB.json RESULT.json

JOB: file, ids (token ids of a window), text and text_ids (what our tokenizer makes of it), prompt (token ids), tokens
(how many to generate), top (log-probabilities per place), plain (id of a token of plain letters), threads.
RESULT: for every place of the window the log-probabilities of the `top` likeliest next tokens and their ids; what is
generated from the prompt; the number of tokens that llama.cpp makes of the text, and whether it predicts the same after
the text as after our ids of it; or `error`, the reason why there is nothing of that.

Every place is asked for by a request of its own, which shares the earlier tokens' cache. Keys and values are float32,
and attention is not fused: what differs from our logits is then how llama.cpp multiplies.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def server(job: dict[str, Any]) -> Any:
    """The model, loaded."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = job["file"]
    settings.n_ctx = max(len(job["ids"]), len(job["prompt"]) + job["tokens"]) + 8
    settings.n_parallel = 1
    settings.n_gpu_layers = 0
    settings.warmup = settings.fit_params = False
    settings.verbosity = 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = job["threads"]
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(settings)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    model = server(job)
    loaded = time.perf_counter()
    # A token that ends the text, or that is no whole character, is answered without log-probabilities. Those that are
    # reported are of the logits before this bias.
    asked = {"n_predict": 1, "temperature": 0, "n_probs": job["top"], "logit_bias": [[job["plain"], 1000]]}
    best, names = [], []
    for end in range(1, len(job["ids"])):
        answer = model.handle_completions({"prompt": job["ids"][:end], **asked, "cache_prompt": True})
        likeliest = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        best.append([entry["logprob"] for entry in likeliest])
        names.append([entry["id"] for entry in likeliest])
    generated: list[int] = []
    for _ in range(job["tokens"]):
        answer = model.handle_completions({"prompt": [*job["prompt"], *generated], **asked, "n_probs": 1})
        generated.append(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["id"])
    made = model.handle_completions({"prompt": job["prompt"], "n_predict": job["tokens"], "temperature": 0})
    once = {**asked, "cache_prompt": False}
    by_text, by_ids = (model.handle_completions({"prompt": job[kind], **once}) for kind in ("text", "text_ids"))
    return {
        "best": best,
        "names": names,
        "generated": generated,
        "continued": made["choices"][0]["text"],
        "text_tokens": by_text["usage"]["prompt_tokens"],
        "same_tokens": by_text["choices"][0]["logprobs"] == by_ids["choices"][0]["logprobs"],
        "seconds": {"load": round(loaded - started, 1), "run": round(time.perf_counter() - loaded, 1)},
    }


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result: dict[str, Any] = {}
    try:
        result = measure(job)
    except Exception as error:  # noqa: BLE001 - whatever llama.cpp raises is the answer
        result = {"error": f"{type(error).__name__}: {error}"}
    found = {**result, "versions": {"xllamacpp": version("xllamacpp")}}
    Path(result_file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
