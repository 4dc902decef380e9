"""The peak memory of a loss on logits: whole logits against chunks of them.

    python recipes/studies/cost/distill_memory.py [--tokens 4096] [--vocabulary 131072] [--width 1024] \\
        [--dtype float32] [--json OUT]

Every case is a process of its own: it makes hidden states and heads of student and teacher, lets a loss of a few tokens
pass (what libraries take at first use), and goes forward and backward once. The figure is the peak of the process's
memory beyond what the inputs take, gradients included, in tensors of logits: tokens x vocabulary of float32. The plain
loss keeps about nine of these; `--plain-tokens` gives it fewer tokens, so that smaller machines can run it, and its
figure is in tensors of its own size.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from compress.evaluation.speed.memory import settled_bytes, watch_memory
from compress.recipes.studies.figures import asked, made_by
from compress.train.losses.chunked_logits import Head, HiddenTeacher, chunked_logits_loss
from compress.train.losses.logits import LogitsLoss, logits_loss
from compress.train.losses.top_k import TopK

MIXED = LogitsLoss(temperature=2.0, alpha=0.5)
CASES = {
    "chunked, teacher's hidden states": ("chunked", "hidden", MIXED),
    "chunked, teacher's top 64": ("chunked", "top k", MIXED),
    "chunked, cross entropy alone": ("chunked", "none", LogitsLoss(alpha=0.0)),
    "plain, teacher's hidden states": ("plain", "hidden", MIXED),
}
KEPT, WARM_TOKENS = 64, 8


def measured(case: str, tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> dict[str, float]:
    """The peak memory of one case, measured in this process."""
    way, whose, how = CASES[case]
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    own = Head((torch.randn(vocabulary, width, dtype=dtype) / width**0.5).requires_grad_())
    theirs = Head(torch.randn(vocabulary, width, dtype=dtype) / width**0.5) if whose == "hidden" else None
    labels = torch.randint(vocabulary, (tokens,))

    def once(count: int) -> float:
        teacher: TopK | HiddenTeacher | None = None
        if theirs is not None:
            teacher = HiddenTeacher(hidden[:count].detach(), theirs)
        elif whose == "top k":
            indices = torch.arange(KEPT).expand(count, KEPT)
            teacher = TopK(torch.randn(count, KEPT).log_softmax(-1) - 0.1, indices, how.temperature)
        if way == "chunked":
            found = chunked_logits_loss(hidden[:count], own, teacher, labels_T=labels[:count], how=how)
        else:
            assert isinstance(teacher, HiddenTeacher)
            with torch.no_grad():
                logits = teacher.head.finish(teacher.head.product(teacher.hidden_TE))
            found = logits_loss(own.finish(own.product(hidden[:count])), logits, labels_T=labels[:count], how=how)
        found.mean().backward()
        return found.mean().item()

    once(WARM_TOKENS)
    hidden.grad = own.weight_VD.grad = None
    device = torch.device("cpu")
    with watch_memory(device, settled_bytes(device)) as peak:
        start = time.perf_counter()
        loss = once(tokens)
        seconds = time.perf_counter() - start
    if peak.bytes is None:
        raise SystemExit("this system does not say how much memory a process has; Linux does")
    return {"loss": loss, "seconds": seconds, "peak_bytes": peak.bytes}


def in_a_process(case: str, tokens: int, arguments: argparse.Namespace) -> dict[str, object]:
    sizes = [str(tokens), str(arguments.vocabulary), str(arguments.width), arguments.dtype]
    done = subprocess.run(
        [sys.executable, __file__, "--case", case, *sizes], capture_output=True, text=True, check=False
    )
    row: dict[str, object] = {"case": case, "tokens": tokens}
    if done.returncode:
        return row | {"failed": f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    found = json.loads(done.stdout)
    one = tokens * arguments.vocabulary * torch.float32.itemsize
    return row | {**found, "logits_tensors": found["peak_bytes"] / one}


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        case, tokens, vocabulary, width, dtype = sys.argv[2:]
        print(json.dumps(measured(case, int(tokens), int(vocabulary), int(width), getattr(torch, dtype))))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--plain-tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for case, (way, _, _) in CASES.items():
        row = in_a_process(case, arguments.plain_tokens if way == "plain" else arguments.tokens, arguments)
        rows.append(row)
        print(json.dumps(row), flush=True)
    record = {
        "command": asked(__file__),
        **made_by(),
        "vocabulary": arguments.vocabulary,
        "width": arguments.width,
        "dtype": arguments.dtype,
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
