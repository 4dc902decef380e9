"""`compress quantize`: from words to passes, and the process group of a sharded run."""

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

import compress
from compress.cli.exits import exits_cleanly, leave
from compress.cli.options import begin, device_option, given, json_option, quiet_option, trust_option, write_report
from compress.errors import InputError

if TYPE_CHECKING:
    from compress.passes.base import Pass

OF_A_METHOD = ("scheme", "bits", "group_size", "grid", "activations", "calibrator")
OF_CALIBRATION = ("samples", "length", "batch_size")


@click.command(short_help="Quantize a model and write a checkpoint.")
@click.argument("model")
@click.option("--method", default="gptq", show_default=True, help="The pass to run: see `compress methods`.")
@click.option(
    "--recipe",
    metavar="FILE",
    help="A YAML file of passes, or a name from `compress recipes`, instead of --method and its options.",
)
@click.option(
    "--scheme",
    help="w2a16 ... w8a16: bits of a weight; w4a8, w8a8: int8 inputs, too; fp8: both float8.  [default: w4a16]",
)
@click.option("--bits", type=int, help="Bits of a weight beside inputs as they are: --bits 3 is --scheme w3a16.")
@click.option(
    "--group-size",
    type=int,
    help="Inputs that share a scale; -1: one scale per output channel. With --recipe: instead of its own.  [default: "
    "128; where that does not divide the inputs of all layers 64, 32, or the largest that does]",
)
@click.option("--grid", help="signed-scale, symmetric, narrow or asymmetric.  [default: signed-scale]")
@click.option("--activations", help="Of w8a8, fp8: dynamic (fitted to every token) or static.  [default: dynamic]")
@click.option(
    "--calibrator", help="Of static ranges: minmax, moving-average, percentile, mse or kl.  [default: minmax]"
)
@click.option(
    "--kv-cache",
    metavar="TYPE[:PER]",
    help="Key-value cache in 8 bits: int8 or fp8, per :token (the default), :head or :tensor (both calibrated: minmax, "
    "or what a recipe says).",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any option of the method, like --set damp=0.05. Repeat for more.",
)
@click.option(
    "--embeddings",
    metavar="SCHEME",
    help="Quantize the token embedding and the output head, too: w2a16 ... w8a16, one scale per token.",
)
@click.option(
    "--calibration", metavar="TEXT", help="What the model is shown. Needed by methods that calibrate (rtn does not)."
)
@click.option("--samples", type=int, help="Windows of calibration text.  [default: 128; every row of a token file]")
@click.option("--length", type=int, help="Tokens per window of text.  [default: the model's context, at most 2048]")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Samples per forward pass.")
@click.option(
    "--ignore", multiple=True, metavar="PATTERN", help="Layers to leave alone, like '*.down_proj'. Repeatable."
)
@click.option("--output", required=True, metavar="OUT", help="The directory to write. It appears when it is complete.")
@click.option(
    "--store",
    metavar="FORM",
    help="2:4: layers that are pruned so without their zeros, for compress.load alone.  [default: zeros and all]",
)
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped.")
@click.option("--overwrite", is_flag=True, help="Replace an output, or drop an unfinished one.")
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Reload the output in a fresh process and compare.  [default: for models up to 2 GiB]",
)
@click.option("--one-block", is_flag=True, help="Run the model as a whole, for blocks that form no chain.")
@click.option(
    "--convolutions/--no-convolutions",
    default=None,
    help="Whether they are layers, too.  [default: where no stack of blocks holds linear layers]",
)
@click.option("--fsdp", is_flag=True, help="Shard the model over the processes of torchrun.")
@trust_option
@device_option
@json_option
@quiet_option
@exits_cleanly
def quantize(
    model: str,
    method: str,
    recipe: str | None,
    embeddings: str | None,
    output: str,
    kv_cache: str | None,
    settings: tuple[str, ...],
    json_file: str | None,
    quiet: bool,
    fsdp: bool,
    **options: Any,
) -> None:
    """Quantize MODEL and write a checkpoint in the compressed-tensors layout.

    \b
    compress quantize demo --method gptq --scheme w3a16 --calibration demo --output out
    compress quantize MODEL --method rtn --scheme w8a16 --group-size -1 --output out
    torchrun --nproc-per-node 2 -m compress quantize MODEL --calibration TEXT --output out --fsdp
    """
    from compress.cli.progress import reporting

    check_processes(fsdp, options["device"])
    chosen = chosen_options({key: options.pop(key) for key in OF_A_METHOD}, settings)
    passes, notes = passes_of(method, chosen) if recipe is None else passes_of_recipe(recipe, chosen)
    passes += added_passes(embeddings, kv_cache)
    if options["calibration"] is None:
        check_unread(passes, f"recipe {recipe!r}" if recipe is not None else f"method {method!r}")
    begin()
    with process_group(fsdp, options["device"]) as rank, reporting("quantize", quiet or rank > 0) as reporter:
        for note in notes:
            reporter.note(note)
        result = compress.quantize(model, passes, output=output, fsdp=fsdp, reporter=reporter, **options)
    if rank == 0:
        assert result.output is not None
        write_report(json_file, json.loads((result.output / "compress.json").read_text(encoding="utf-8")))
        if not quiet and json_file != "-":
            from compress.cli import tables as show

            show.result(result, model, output)
    if fsdp:
        leave(0)


def chosen_options(options: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The options of a method that a person gave: those of the command line, and what --set says."""
    chosen = {key: value for key, value in options.items() if value is not None}
    if "bits" in chosen:
        bits = f"w{chosen.pop('bits')}a16"
        if "scheme" in chosen:
            raise InputError(f"--bits is short for --scheme {bits}; drop it, or --scheme {chosen['scheme']}")
        chosen["scheme"] = bits
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r}; write NAME=VALUE")
        name = name.replace("-", "_")
        if name in chosen:
            raise InputError(f"option {name} is given twice ({chosen[name]!r} and {value!r}); give it once")
        chosen[name] = value
    return chosen


def passes_of(method: str, chosen: Mapping[str, Any]) -> tuple[tuple["Pass", ...], list[str]]:
    """The pass of a method, and nothing to remark."""
    from compress.recipe import make_pass

    return (make_pass(method, chosen),), []


def passes_of_recipe(recipe: str, chosen: dict[str, Any]) -> tuple[tuple["Pass", ...], list[str]]:
    """The passes of a recipe, of which a person may change the group size alone, and remarks about that."""
    from compress.recipe import load_recipe, regrouped

    size = chosen.pop("group_size") if given("group_size") else None
    dropped = [name for name in ("method", "embeddings", "kv_cache") if given(name)] + [*chosen]
    if dropped:
        raise InputError(f"--recipe says everything about its passes but --group-size; drop {', '.join(dropped)}")
    passes = load_recipe(recipe)
    if size is None:
        return passes, []
    passes, changed = regrouped(passes, size)
    return passes, [f"--group-size {size} instead of what recipe {recipe!r} gives {', '.join(changed)}"]


def added_passes(embeddings: str | None, kv_cache: str | None) -> tuple["Pass", ...]:
    """The passes that --embeddings and --kv-cache ask for."""
    added: tuple[Pass, ...] = ()
    if embeddings is not None:
        from compress.recipe import make_pass

        added = (make_pass("embeddings", {"scheme": embeddings}),)
    if kv_cache is not None:
        from compress.passes.kv_cache import cache_pass

        added = (*added, cache_pass(kv_cache))
    return added


def check_unread(passes: Sequence["Pass"], who: str) -> None:
    """Refuse options of calibration data where there is none, and nobody reads it."""
    unread = [f"--{name.replace('_', '-')}" for name in OF_CALIBRATION if given(name)]
    if unread and not any(p.calibrated for p in passes):
        raise InputError(f"{who} uses no calibration data; drop {', '.join(unread)}")


def check_processes(fsdp: bool, device: str | None) -> None:
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
def process_group(fsdp: bool, device: str | None) -> Iterator[int]:
    """The process group of torchrun for a sharded run; yields the rank (0 in an ordinary run)."""
    if not fsdp:
        yield 0
        return
    import torch
    import torch.distributed as dist

    from compress.comm import Comm
    from compress.ranks import terminate, watching
    from compress.run.residency import Sharded

    Sharded.require()
    signal.signal(signal.SIGTERM, terminate)  # torchrun's, when another rank has ended
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        with watching(Comm()):
            yield dist.get_rank()
            dist.barrier()  # ranks that leave before the others abort them
    finally:
        dist.destroy_process_group()
