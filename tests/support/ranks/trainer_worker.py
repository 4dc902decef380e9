"""Run by every process of `torchrun`, as `accelerate launch` does it: transformers' Trainer over a prepared model, then
`convert`: trainer_worker.py FOLDER PROCESSES [sharded]."""

import os
import sys
from pathlib import Path

import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from commands import fast_gptq
from models import build, tokens

import compress


class Rows(torch.utils.data.Dataset):
    """Eight samples: token ids with themselves as labels."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = tokens(8, seed=4)[i]
        return {"input_ids": ids, "labels": ids}


def main(here: Path, processes: int, sharded: bool) -> None:
    """All samples in every step, however many processes there are. sharded: by FSDP2."""
    prepared = compress.prepare_qat(
        build("llama"), fast_gptq(scheme="w2a16", group_size=16), calibration=tokens(8), batch_size=4
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(here / "trainer"),
        max_steps=3,
        per_device_train_batch_size=8 // processes,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
        fsdp=sharded or None,
    )
    if sharded and arguments.device.type == "cpu":  # accelerate shards over devices, for which CPUs pass here
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU

    class Trainer(transformers.Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(prepared.groups(learning_rate=1e-3))
            return self.optimizer

    Trainer(prepared.model, arguments, train_dataset=Rows()).train()
    assert isinstance(prepared.model, torch.distributed.fsdp.FSDPModule) == sharded
    with torch.no_grad():
        seen = prepared.model.eval()(input_ids=tokens(4, seed=9)).logits
    prepared.convert(here / "out", verify=False)
    torch.save(seen, here / f"seen-{os.environ.get('RANK', 0)}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "sharded" in sys.argv)
