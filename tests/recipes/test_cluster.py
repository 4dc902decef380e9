"""The jobs for clusters, each as two torchruns of this machine, as the cluster would start them."""

import os
import sys
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import same
from models import build, tokens
from places import ROOT
from processes import free_port, together

import compress

pytestmark = [
    pytest.mark.full,
    pytest.mark.dist,
    pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="torch < 2.13"),
]
# `srun` starts its words once for each machine.
SRUN = '#!/bin/sh\n"$@" & "$@" || exit 1\nwait $!\n'
TORCHRUN = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'


def slurm(folder: Path, words: list[str]) -> None:
    stubs = folder / "bin"
    stubs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost\n"), ("torchrun", TORCHRUN)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    settings = {"SLURM_JOB_NODELIST": "two", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "PORT": str(free_port())}
    path = os.pathsep.join([str(stubs), os.environ["PATH"]])
    ((code, said),) = together([["bash", str(ROOT / "recipes/cluster/slurm.sh"), *words]], {**settings, "PATH": path})
    assert code == 0, said


def kubernetes(folder: Path, words: list[str]) -> None:
    service, job = yaml.safe_load_all((ROOT / "recipes/cluster/kubernetes.yaml").read_text(encoding="utf-8"))
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    first = f"{job['metadata']['name']}-0.{pods['subdomain']}:29500"
    assert service["metadata"]["name"] == pods["subdomain"]
    started = [
        f"localhost:{port}" if word == first else word
        for port in [free_port()]
        for word in container["command"] + container["args"]
    ]
    at = started.index("quantize") + 1
    started = [sys.executable, "-m", "torch.distributed.run", *started[1:at], *words, "--fsdp", "--resume"]
    started[started.index("--nproc-per-node") + 1] = "1"
    assert {word for word in container["args"][5:] if word.startswith("--")} <= {*words, "--fsdp", "--resume"}
    ended = together([started] * job["spec"]["completions"])
    assert [code for code, _ in ended] == [0, 0], ended


@pytest.mark.parametrize("cluster", [slurm, kubernetes])
def test_two_machines_of_a_cluster_finish_one_run(cluster, tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    torch.save(tokens(8), tmp_path / "text.pt")
    method = {"group_size": 16, "statistics": "float64"}
    words = [
        str(tmp_path / "model"),
        "--method",
        "gptq",
        "--calibration",
        str(tmp_path / "text.pt"),
        "--device",
        "cpu",
        "--batch-size",
        "2",
    ]
    words += [word for name, value in method.items() for word in ("--set", f"{name}={value}")]
    cluster(tmp_path, [*words, "--output", str(tmp_path / "out")])
    compress.quantize(
        tmp_path / "model",
        compress.GPTQ(**method),
        calibration=tokens(8),
        batch_size=2,
        output=tmp_path / "one",
        verify=False,
    )
    same(tmp_path / "one", tmp_path / "out")
