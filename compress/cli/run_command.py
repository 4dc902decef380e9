"""The common part of commands that run passes over a model and write a checkpoint: options, refusals, the run itself,
and the process group of a sharded one."""

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

import compress
from compress.base.errors import InputError
from compress.cli.byte_savings import check_allowed, end, promises
from compress.cli.exit_codes import leave
from compress.cli.option_groups import (
    calibration_option,
    extent_options,
    group,
    ignore_option,
    saving_options,
    training_option,
    working_options,
)
from compress.cli.options import begin, given, write_report

if TYPE_CHECKING:
    from compress.passes.protocol.base import Pass

# Time that a rank may take until it is where the others wait: each solves its experts without a word to them.
PATIENCE = timedelta(hours=2)
OF_CALIBRATION = ("samples", "length", "bos", "batch_size")


store_option = click.option(
    "--store",
    metavar="FORM",
    help="2:4: store layers pruned to 2:4 without their zeros, readable by compress.load only.  [default: with zeros]",
)
parts_options = group(
    click.option(
        "--one-block",
        is_flag=True,
        help="Treat the model as one block, if its blocks do not run one after another.",
    ),
    click.option(
        "--convolutions/--no-convolutions",
        default=None,
        help="Also compress convolutions.  [default: only if no block has linear layers]",
    ),
)
run_options = group(
    calibration_option(),
    training_option,
    extent_options,
    ignore_option,
    click.option("--output", required=True, metavar="OUT", help="Directory to write; it appears once complete."),
    store_option,
    saving_options,
    parts_options,
    click.option(
        "--drop-zeros", is_flag=True, help="Allow zeros of a pruned model to become nonzero.  [default: they stay zero]"
    ),
    click.option(
        "--fsdp",
        is_flag=False,
        flag_value=True,
        default=False,
        type=click.UNPROCESSED,
        metavar="[RxS]",
        help="Shard the model over the processes of torchrun (FSDP2); RxS: R replicas, each in S shards.",
    ),
    click.option(
        "--spill",
        metavar="FOLDER",
        help="Keep large tensors in files in this folder, if blocks, statistics or calibration data do not fit in "
        "memory.",
    ),
    working_options,
)


def run(
    task: str,
    model: str,
    passes: Sequence["Pass"],
    who: str,
    notes: Sequence[str] = (),
    engine: str | None = None,
    *,
    output: str,
    json_file: str | None,
    quiet: bool,
    fsdp: bool | str,
    allow_little: bool,
    **options: Any,
) -> None:
    """Run passes, show what came of it, and leave with 1 where that is next to nothing. task: the verb that progress is
    told by; who: what is blamed for options that nobody reads; notes: remarks to make first; engine: as in
    `compress.quantize_for`; options: those of `compress.quantize`."""
    from compress.cli.progress import reporting

    if options["calibration"] is None:
        check_unread(passes, who)
    if options["training"] is not None and not any(p.name == "train" for p in passes):
        raise InputError(f"{who} trains nothing; drop --training")
    promised = promises(task, passes, options["store"])
    check_allowed(promised, who)
    begin()
    with process_group(fsdp, options["device"]) as rank, reporting(task, quiet or rank > 0) as reporter:
        for note in notes:
            reporter.note(note)
        how = {"output": output, "fsdp": fsdp, "reporter": reporter, **options}
        left = None if engine is None else compress.quantize_for(engine, model, passes, notes=notes, **how)
        result = compress.quantize(model, passes, **how) if left is None else left.result
    if rank == 0:
        assert result.output is not None
        if engine is not None and left is not None and left.exported is not None:
            from compress.cli.run_results import leave_card

            leave_card(left, engine, model)
        write_report(json_file, json.loads((result.output / "compress.json").read_text(encoding="utf-8")))
        if not quiet and json_file != "-":
            from compress.cli.run_results import show_result

            show_result(result, model, output, left, engine)
    end(result.record, output, promised=promised, allowed=allow_little, first=rank == 0)
    if fsdp:
        leave(0)


def split_settings(settings: Sequence[str], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a method: those chosen already, and what --set says."""
    options = dict(chosen)
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r}; write NAME=VALUE")
        name = name.replace("-", "_")
        if name in options:
            raise InputError(f"option {name} is given twice ({options[name]!r} and {value!r}); give it once")
        options[name] = value
    return options


def check_unread(passes: Sequence["Pass"], who: str) -> None:
    """Refuse options of calibration data where no pass reads any; training reads them too."""
    unread = [f"--{name.replace('_', '-')}" for name in OF_CALIBRATION if given(name)]
    if unread and not any(p.calibrated or p.name == "train" for p in passes):
        raise InputError(f"{who} uses no calibration data; drop {', '.join(unread)}")


def check_processes(fsdp: bool | str, device: str | None) -> None:
    """Refuse what does not go with the number of processes."""
    if not fsdp:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("several processes were started; add --fsdp to shard the model over them")
        return
    if device is not None and ":" in device:
        raise InputError(f"--device {device} with --fsdp would put every process on one GPU; give cpu or cuda")
    if "RANK" not in os.environ:
        raise InputError("--fsdp runs under torchrun: torchrun --nproc-per-node 2 -m compress quantize ... --fsdp")


@contextmanager
def process_group(fsdp: bool | str, device: str | None) -> Iterator[int]:
    """The process group of torchrun for a sharded run; yields the rank (0 in an ordinary run)."""
    if not fsdp:
        yield 0
        return
    import torch
    import torch.distributed as dist

    from compress.base.collectives import Comm
    from compress.base.lost_ranks import terminate, watching
    from compress.engine.residency import Sharded

    Sharded.require()
    signal.signal(signal.SIGTERM, terminate)  # torchrun's, when another rank has ended
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        with watching(Comm()):
            yield dist.get_rank()
            dist.barrier()  # ranks that leave before the others abort them
    finally:
        dist.destroy_process_group()
