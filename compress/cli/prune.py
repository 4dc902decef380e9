"""`compress prune`: a mask over a model, written as a plain checkpoint with zeros."""

from typing import TYPE_CHECKING, Any

import click

from compress.cli.exits import exits_cleanly
from compress.cli.running import check_processes, run, run_options, setting_option, split_settings
from compress.errors import InputError

if TYPE_CHECKING:
    from compress.passes.base import Pass

OF_A_MASK = ("pattern", "sparsity", "per", "allocate")


@click.command(short_help="Make weights zero and write a checkpoint.")
@click.argument("model")
@click.option(
    "--method",
    default="sparsegpt",
    show_default=True,
    help="magnitude, wanda, sparsegpt or taylor: see `compress methods`.",
)
@click.option("--pattern", metavar="N:M", help="Keep N of every M inputs in a row, like 2:4.")
@click.option("--sparsity", type=float, help="Instead of a pattern: the share that becomes zero.  [default: 0.5]")
@click.option(
    "--per",
    help="Of a share: row (of each output), layer (of all of a layer) or model (of all layers, but for sparsegpt).  "
    "[default: row]",
)
@click.option(
    "--allocate",
    help="Of wanda and sparsegpt: whether all layers lose the same share (uniform), or by outliers (owl), or by what "
    "each loses (layer-loss).  [default: uniform]",
)
@setting_option
@run_options
@exits_cleanly
def prune(model: str, method: str, settings: tuple[str, ...], fsdp: bool, **options: Any) -> None:
    """Make weights of MODEL zero and write a plain checkpoint of transformers.

    \b
    compress prune demo --method sparsegpt --pattern 2:4 --calibration demo --output out
    compress prune MODEL --method wanda --sparsity 0.5 --calibration TEXT --output out
    compress prune MODEL --method taylor --per model --sparsity 0.5 --calibration TEXT --output out
    compress quantize MODEL --recipe w4a16-24 --calibration TEXT --output out    # and round what is left
    """
    check_processes(fsdp, options["device"])
    chosen = {key: value for key in OF_A_MASK if (value := options.pop(key)) is not None}
    passes = (mask_pass(method, split_settings(settings, chosen)),)
    run("prune", model, passes, f"method {method!r}", fsdp=fsdp, **options)


def mask_pass(method: str, chosen: dict[str, Any]) -> "Pass":
    """A pass that prunes, by its name. Raises InputError for one that does not."""
    from compress.recipe import PASSES, make_pass, pass_class

    if pass_class(method).writes != "mask":
        known = ", ".join(name for name in PASSES if pass_class(name).writes == "mask")
        raise InputError(f"method {method!r} makes no mask; allowed: {known}, or use `compress quantize`")
    return make_pass(method, chosen)
