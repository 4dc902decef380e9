"""`compress prune`: a mask over a model, or a part of its structure removed, written as a plain checkpoint."""

from typing import TYPE_CHECKING, Any

import click

from compress.base.errors import InputError
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import setting_option
from compress.cli.options import given
from compress.cli.run_command import check_processes, run, run_options, split_settings

if TYPE_CHECKING:
    from compress.passes.protocol.base import Pass

OF_A_MASK = ("pattern", "sparsity", "per", "allocate")
# What --structure takes away of which it names no amount: shares, and a number of blocks.
USUAL_AMOUNTS = {"heads": 0.25, "channels": 0.25, "hidden": 0.25, "layers": 1, "experts": 0.25}


class MaskMethod(click.Option):
    """--method, whose help lists the methods that prune when it is asked for."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from compress.cli.cards import methods_that_write

        *most, last = methods_that_write("mask")
        self.help = f"{', '.join(most)} or {last}: see `compress methods`."
        return super().get_help_record(ctx)


@click.command(short_help="Make weights zero, or remove heads, channels and layers, and write a checkpoint.")
@click.argument("model")
@click.option(
    "--method",
    default="sparsegpt",
    show_default=True,
    cls=MaskMethod,
)
@click.option("--pattern", metavar="N:M", help="Keep N of every M inputs in a row, like 2:4.")
@click.option("--sparsity", type=float, help="Share of weights set to zero, instead of a pattern.  [default: 0.5]")
@click.option(
    "--structure",
    metavar="PARTS",
    help="Remove whole parts instead: heads, channels, hidden (width), layers or experts, and how much of each, like "
    "heads:0.25,channels:0.25,layers:1 (the defaults).",
)
@click.option(
    "--per",
    help="Scope of --sparsity: row (each output) or layer.  [default: row]",
)
@click.option(
    "--allocate",
    help="Sparsity per layer, for wanda and sparsegpt: uniform or layer-loss (by the KL that "
    "pruning the layer causes; slow for many layers).  [default: uniform]",
)
@setting_option
@run_options
@exits_cleanly
def prune(
    model: str, method: str, structure: str | None, settings: tuple[str, ...], fsdp: bool | str, **options: Any
) -> None:
    """Make weights of MODEL zero, or remove parts of it, and write a plain transformers checkpoint.

    \b
    compress prune demo --pattern 2:4 --calibration demo --output out
    compress prune MODEL --method wanda --calibration TEXT --output out
    compress prune MODEL --method taylor --per layer --calibration TEXT ...
    compress prune demo --structure layers --calibration demo --output out
    compress quantize MODEL --recipe w4a16-24 --calibration TEXT --output out
    """
    check_processes(fsdp, options["device"])
    chosen = {key: value for key in OF_A_MASK if (value := options.pop(key)) is not None}
    if structure is None:
        passes, who = (mask_pass(method, split_settings(settings, chosen)),), f"method {method!r}"
    else:
        passes, who = (structure_pass(structure, settings, chosen),), f"structure {structure!r}"
    run("prune", model, passes, who, fsdp=fsdp, **options)


def structure_pass(words: str, settings: tuple[str, ...], of_a_mask: dict[str, Any]) -> "Pass":
    """The pass that removes what --structure says. Raises InputError for options of a mask beside it."""
    from compress.passes.protocol.recipe import make_pass

    unread = [f"--{name}" for name in ("method", *of_a_mask) if name in of_a_mask or given(name)]
    if unread:
        raise InputError(
            f"--structure removes, {', '.join(unread)} makes zero; give one, or both as steps of a recipe "
            "(compress quantize --recipe)"
        )
    return make_pass("structure", split_settings(settings, parts_of(words)))


def parts_of(words: str) -> dict[str, Any]:
    """The options that `heads,channels:0.3,layers:2` describes: what goes and, behind a colon, how much of it."""
    chosen: dict[str, Any] = {}
    for word in words.split(","):
        what, colon, amount = word.strip().partition(":")
        if what not in USUAL_AMOUNTS or (colon and not amount):
            usual = ",".join(f"{name}:{amount}" for name, amount in USUAL_AMOUNTS.items())
            raise InputError(
                f"structure {words!r}; allowed: {', '.join(USUAL_AMOUNTS)} with commas between, and behind a colon how "
                f"much of each goes ({usual})"
            )
        if what in chosen:
            raise InputError(f"structure {words!r} says {what} twice; give it once")
        chosen[what] = amount or USUAL_AMOUNTS[what]
    return chosen


def mask_pass(method: str, chosen: dict[str, Any]) -> "Pass":
    """A pass that prunes, by its name. Raises InputError for one that does not."""
    from compress.passes.protocol.recipe import PASSES, make_pass, pass_class

    if pass_class(method).writes != "mask":
        known = ", ".join(name for name in PASSES if pass_class(name).writes == "mask")
        raise InputError(f"method {method!r} makes no mask; allowed: {known}, or use `compress quantize`")
    return make_pass(method, chosen)
