"""`compress quantize`: from words to passes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from compress.cli.commands.allocate import budget_options, quantize_to_budget, unread_without_budget
from compress.cli.exits import exits_cleanly
from compress.cli.options import given
from compress.cli.running import check_processes, run, run_options, setting_option, split_settings
from compress.errors import InputError, one_of

if TYPE_CHECKING:
    from compress.passes.protocol.base import Pass

EFFORTS = ("fast", "default", "best")
# What --effort fast leaves out of gptq: the searches before and behind its sweep.
FAST = {"clip": False, "refit": 0, "sweeps": 0}
OF_A_METHOD = ("scheme", "bits", "group_size", "grid", "activations", "calibrator")

kv_cache_option = click.option(
    "--kv-cache",
    metavar="TYPE[:PER]",
    help="Key-value cache in 8 bits: int8 or fp8, per :token (the default), :head or :tensor (both calibrated: minmax, "
    "or what a recipe says).",
)
embeddings_option = click.option(
    "--embeddings",
    metavar="SCHEME",
    help="Quantize the token embedding and the output head, too: w2a16 ... w8a16, one scale per token.",
)


@click.command(short_help="Quantize a model and write a checkpoint.")
@click.argument("model")
@click.option("--method", default="gptq", show_default=True, help="The pass to run: see `compress methods`.")
@click.option(
    "--effort",
    help="Of gptq. fast: its sweep alone (clip=false, refit=0, sweeps=0); best: `reconstruct` behind it.  [default: "
    "default]",
)
@click.option(
    "--recipe",
    metavar="FILE",
    help="A YAML file of passes, or a name from `compress recipes`, instead of --method and its options.",
)
@click.option(
    "--scheme",
    help="w2a16 ... w8a16: bits of a weight; w2a2, w3a3, w4a4, w4a8, w8a8: of inputs, too; fp8, fp8-block: float8.  "
    "[default: w4a16]",
)
@click.option("--bits", type=int, help="Bits of a weight beside inputs as they are: --bits 3 is --scheme w3a16.")
@click.option(
    "--group-size",
    type=int,
    help="Inputs that share a scale; -1: one scale per output channel. With --recipe: instead of its own.  [default: "
    "128; where that does not divide the inputs of all layers 64 or 32, each layer's own, or -1; of spqr 16]",
)
@click.option("--grid", help="signed-scale, symmetric, narrow or asymmetric.  [default: signed-scale]")
@click.option("--activations", help="Of rounded inputs: dynamic (fitted to every token) or static.  [default: dynamic]")
@click.option(
    "--calibrator", help="Of static ranges: minmax, moving-average, percentile, mse or kl.  [default: minmax]"
)
@kv_cache_option
@setting_option
@embeddings_option
@budget_options
@run_options
@exits_cleanly
def quantize(
    model: str,
    method: str,
    effort: str | None,
    recipe: str | None,
    embeddings: str | None,
    kv_cache: str | None,
    settings: tuple[str, ...],
    fsdp: bool,
    budget: str | None,
    max_kl: float | None,
    text: str | None,
    by: str,
    fused: bool,
    **options: Any,
) -> None:
    """Quantize MODEL and write a checkpoint in the compressed-tensors layout.

    \b
    compress quantize demo --method gptq --scheme w3a16 --calibration demo --output out
    compress quantize MODEL --method rtn --scheme w8a16 --group-size -1 --output out
    compress quantize MODEL --budget 3.5bpw --calibration TEXT --output out
    torchrun --nproc-per-node 2 -m compress quantize MODEL --calibration TEXT --output out --fsdp
    """
    check_processes(fsdp, options["device"])
    chosen = chosen_options({key: options.pop(key) for key in OF_A_METHOD}, settings)
    if budget is not None or max_kl is not None:
        options |= {"budget": budget, "max_kl": max_kl, "text": text, "by": by, "fused": fused, "fsdp": fsdp}
        quantize_to_budget(model, method, chosen, **options)
        return
    unread_without_budget()
    passes, notes = passes_with_effort(method, chosen, effort) if recipe is None else passes_of_recipe(recipe, chosen)
    passes += added_passes(embeddings, kv_cache)
    who = f"method {method!r}" if recipe is None else f"recipe {recipe!r}"
    run("quantize", model, passes, who, notes, fsdp=fsdp, **options)


def chosen_options(options: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The options of a method that a person gave: those of the command line, and what --set says."""
    chosen = {key: value for key, value in options.items() if value is not None}
    if "bits" in chosen:
        bits = f"w{chosen.pop('bits')}a16"
        if "scheme" in chosen:
            raise InputError(f"--bits is short for --scheme {bits}; drop it, or --scheme {chosen['scheme']}")
        chosen["scheme"] = bits
    return split_settings(settings, chosen)


def passes_of(method: str, chosen: Mapping[str, Any]) -> tuple[tuple["Pass", ...], list[str]]:
    """The pass of a method, and nothing to remark."""
    from compress.passes.protocol.recipe import make_pass

    return (make_pass(method, chosen),), []


def passes_with_effort(
    method: str, chosen: Mapping[str, Any], effort: str | None
) -> tuple[tuple["Pass", ...], list[str]]:
    """The passes of a method with so much effort, and which these are, where that is not the method alone."""
    from compress.passes.protocol.recipe import make_pass

    if effort is None:
        return passes_of(method, chosen)
    one_of("effort", effort, EFFORTS)
    if method != "gptq":
        raise InputError(f"--effort is of gptq; {method} has its own options (`compress methods {method}`)")
    if effort == "default":
        return passes_of(method, chosen)
    if effort == "fast":
        passes, _ = passes_of(method, {**FAST, **chosen})
        said = ", ".join(f"{name}={value}" for name, value in FAST.items() if name not in chosen)
        return passes, [f"--effort fast: gptq with {said}"] if said else []
    passes, _ = passes_of(method, chosen)
    return (*passes, make_pass("reconstruct", {})), ["--effort best: gptq, then reconstruct (`compress methods`)"]


def passes_of_recipe(recipe: str, chosen: dict[str, Any]) -> tuple[tuple["Pass", ...], list[str]]:
    """The passes of a recipe, of which a person may change the group size alone, and remarks about that."""
    from compress.passes.protocol.recipe import load_recipe, regrouped

    size = chosen.pop("group_size") if given("group_size") else None
    dropped = [name for name in ("method", "effort", "embeddings", "kv_cache") if given(name)] + [*chosen]
    if dropped:
        raise InputError(f"--recipe says everything about its passes but --group-size; drop {', '.join(dropped)}")
    passes = load_recipe(recipe)
    if size is None:
        return passes, []
    passes, changed = regrouped(passes, size)
    if not changed:
        raise InputError(f"no pass of the recipe has groups, so group size {size} has no say; leave it out")
    return passes, [f"--group-size {size} instead of what recipe {recipe!r} gives {', '.join(changed)}"]


def added_passes(embeddings: str | None, kv_cache: str | None) -> tuple["Pass", ...]:
    """The passes that --embeddings and --kv-cache ask for."""
    added: tuple[Pass, ...] = ()
    if embeddings is not None:
        from compress.passes.protocol.recipe import make_pass

        added = (make_pass("embeddings", {"scheme": embeddings}),)
    if kv_cache is not None:
        from compress.passes.kv_cache import cache_pass

        added = (*added, cache_pass(kv_cache))
    return added
