"""`compress quantize`: from words to passes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from compress.base.errors import InputError, one_of
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import OF_A_METHOD, added_options, group, method_options, plugin_option, setting_option
from compress.cli.options import given, import_plugins
from compress.cli.run_command import check_processes, run, run_options, split_settings

if TYPE_CHECKING:
    from compress.jobs.target_engines import Picked
    from compress.passes.protocol.base import Pass

# Options of methods that can round for the loss, where they have them. fast: without the searches before and behind
# their sweep.
EFFORTS: Mapping[str, Mapping[str, Any]] = {
    "fast": {"clip": False, "search": False, "refit": 0, "sweeps": 0},
    "default": {},
    "best": {"objective": "loss"},
}


recipe_options = group(
    click.option("--method", default="gptq", show_default=True, help="The method: see `compress methods`."),
    click.option(
        "--effort",
        help="For gptq, spqr and trellis. fast: without the searches for ranges and scales (clip=false, search=false, "
        "refit=0, sweeps=0); default: with them; best: rounded for the loss of the model instead of each layer's own "
        "(objective=loss), 2 to 3 times as long.  [default: default]",
    ),
    click.option(
        "--recipe",
        metavar="FILE",
        help="A YAML file of methods, run in turn, or a name from `compress recipes`. It replaces --method and its "
        "options, except --group-size.",
    ),
    click.option(
        "--rotate/--no-rotate",
        default=None,
        help="Multiply by orthogonal (Hadamard) matrices first, which spreads outliers: `compress methods rotate`. "
        "They are merged into the weights; for --method trellis, applied to layer inputs at inference.  [default: only "
        "for trellis]",
    ),
    click.option(
        "--for",
        "engine",
        metavar="ENGINE",
        help="The engine that will run it: llama.cpp, vllm, mlx, transformers, ort, ort-genai, gptqmodel. Picks a "
        "scheme that it runs and writes the files that it opens to OUT; if these are another format, the checkpoint "
        "is kept in OUT.checkpoint.",
    ),
    plugin_option,
)


@click.command(short_help="Quantize a model and write a checkpoint.")
@click.argument("model")
@recipe_options
@click.option(
    "--recover",
    metavar="TIME",
    help="After quantizing, train on the calibration data for this long, like 30min (`compress methods train`). The "
    "result is kept only if it is better on held-out samples.",
)
@method_options
@setting_option
@added_options
@run_options
@exits_cleanly
def quantize(
    model: str,
    method: str,
    effort: str | None,
    recipe: str | None,
    rotate: bool | None,
    recover: str | None,
    engine: str | None,
    embeddings: str | None,
    kv_cache: str | None,
    settings: tuple[str, ...],
    fsdp: bool | str,
    **options: Any,
) -> None:
    """Quantize MODEL and write a checkpoint in the compressed-tensors layout.

    \b
    compress quantize demo --scheme w3a16 --calibration demo --output out
    compress quantize MODEL --method rtn --scheme w8a16 --output out
    compress quantize MODEL --recipe w4a16-gptq --calibration TEXT --output out
    compress quantize MODEL --for llama.cpp --calibration TEXT --output out
    torchrun --nproc-per-node 2 -m compress quantize MODEL --fsdp ...
    """
    check_processes(fsdp, options["device"])
    chosen = chosen_options({key: options.pop(key) for key in OF_A_METHOD}, settings)
    remarks: list[str] = []
    if engine is not None and not (given("method") or any((recipe, effort, recover, settings, options["calibration"]))):
        method, remarks = method_without_text(engine, method)
    passes, notes = passes_asked(method, effort, recipe, rotate, engine, chosen, embeddings, kv_cache)
    passes, notes = with_recovery(passes, recover), [*notes, *remarks]
    who = f"method {method!r}" if recipe is None else f"recipe {recipe!r}"
    run("quantize", model, passes, who, notes, engine, fsdp=fsdp, **options)


def passes_asked(
    method: str,
    effort: str | None,
    recipe: str | None,
    rotate: bool | None,
    engine: str | None,
    chosen: dict[str, Any],
    embeddings: str | None,
    kv_cache: str | None,
) -> tuple[tuple["Pass", ...], list[str]]:
    """The passes that the words of a command line ask for, and remarks about them. chosen: options of the method."""
    picks: list[str] = []
    if engine is not None:
        chosen, picks, tables = for_engine(engine, method, chosen, recipe)
        embeddings = embeddings or tables
    passes, notes = passes_with_effort(method, chosen, effort) if recipe is None else passes_of_recipe(recipe, chosen)
    rotation, remarks = rotation_asked(rotate, method)
    passes = (*rotation, *passes, *added_passes(embeddings, kv_cache, engine, scales=chosen.get("scales")))
    if engine is not None:
        from compress.jobs.target_engines import check_engine

        check_engine(engine, passes)
    return passes, [*picks, *remarks, *notes]


def for_engine(engine: str, method: str, chosen: Mapping[str, Any], recipe: str | None) -> "Picked":
    """The options of a method, with those that the engine needs, and what was picked. A recipe keeps its own."""
    from compress.jobs.target_engines import Picked, engine_named, pick_options
    from compress.passes.protocol.recipe import options_of, pass_class

    engine_named(engine)
    if recipe is not None:
        return Picked(dict(chosen), [])
    return pick_options(engine, method, chosen, list(options_of(pass_class(method))))


def method_without_text(engine: str, method: str) -> tuple[str, list[str]]:
    """Rounding to nearest, and a remark, for an engine whose types lose little by it; else the method as it is."""
    from compress.jobs.target_engines import engine_named

    if engine_named(engine).mix is None:
        return method, []
    return "rtn", [f"no --calibration: rounded to nearest; with a text (or self), {method} is closer to the original"]


def chosen_options(options: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The options of a method that a person gave: those of the command line, and what --set says."""
    chosen = {key: value for key, value in options.items() if value is not None}
    if "bits" in chosen:
        bits = f"w{chosen.pop('bits')}a16"
        if "scheme" in chosen:
            raise InputError(f"--bits is short for --scheme {bits}; drop it, or --scheme {chosen['scheme']}")
        chosen["scheme"] = bits
    return split_settings(settings, chosen)


def passes_with_effort(
    method: str, chosen: Mapping[str, Any], effort: str | None
) -> tuple[tuple["Pass", ...], list[str]]:
    """The passes of a method with so much effort, and which these are, where that is not the method alone."""
    from compress.passes.protocol.recipe import make_pass, options_of

    known = options_of(type(make_pass(method, chosen)))  # of gptq k-quants, where the scheme is one of llama.cpp's
    if effort is not None:
        one_of("effort", effort, EFFORTS)
        if "objective" not in known:
            whose = "gptq, k-quants, spqr and trellis"
            raise InputError(f"--effort is of {whose}; {method} has its own options (`compress methods {method}`)")
    options = {name: value for name, value in EFFORTS[effort or "default"].items() if name in known}
    words = ", ".join(f"{name}={value}" for name, value in options.items() if name not in chosen)
    return (make_pass(method, {**options, **chosen}),), [f"--effort {effort}: {method} with {words}"] if words else []


def passes_of_recipe(recipe: str, chosen: dict[str, Any]) -> tuple[tuple["Pass", ...], list[str]]:
    """The passes of a recipe, of which a person may change the group size alone, and remarks about that."""
    from compress.passes.protocol.recipe import load_recipe, regrouped

    size = chosen.pop("group_size") if given("group_size") else None
    dropped = [name for name in ("method", "effort", "rotate", "embeddings", "kv_cache") if given(name)] + [*chosen]
    if dropped:
        named = ", ".join(dropped)
        raise InputError(
            f"--recipe sets all options of its passes; drop {named}: only --group-size may be combined with it"
        )
    import_plugins()
    passes = load_recipe(recipe)
    if size is None:
        return passes, []
    passes, changed = regrouped(passes, size)
    if not changed:
        raise InputError(f"no pass of the recipe has groups, so group size {size} has no say; leave it out")
    return passes, [f"--group-size {size} instead of what recipe {recipe!r} gives {', '.join(changed)}"]


def rotation_asked(rotate: bool | None, method: str) -> tuple[tuple["Pass", ...], list[str]]:
    """The pass that --rotate asks for, or that trellis codes need, and a remark about the latter. Raises InputError
    beside a method that is the same."""
    from compress.passes.protocol.recipe import make_pass

    if method == "trellis" and rotate is not False:
        # With every other rotation a tied head gets a weight of its own, or fewer channels are mixed.
        rotation = make_pass("rotate", {"hidden": False, "heads": False, "online": True})
        said = (
            [] if rotate else ["trellis: the model rotates the inputs of layers as it runs (--no-rotate: it does not)"]
        )
        return (rotation,), said
    if not rotate:
        return (), []
    if method == "rotate":
        raise InputError("--method rotate rotates already; drop --rotate")
    return (make_pass("rotate", {}),), []


def with_recovery(passes: tuple["Pass", ...], recover: str | None) -> tuple["Pass", ...]:
    """Passes with the training that --recover asks for behind those of layers. Raises InputError where these leave
    nothing to recover."""
    if recover is None:
        return passes
    from compress.passes.train import recovery

    lossy = [i for i, p in enumerate(passes) if p.writes in ("quantized weight", "mask") and p.treats == "layers"]
    if not lossy:
        raise InputError("--recover trains what was quantized or pruned; add such a method, or drop it")
    return (*passes[: lossy[-1] + 1], recovery(recover), *passes[lossy[-1] + 1 :])


def added_passes(
    embeddings: str | None, kv_cache: str | None, engine: str | None = None, *, scales: str | None = None
) -> tuple["Pass", ...]:
    """The passes that --embeddings and --kv-cache ask for, embeddings in the groups that an engine has. scales: that
    option of the method, which embeddings have, too."""
    added: tuple[Pass, ...] = ()
    if embeddings is not None:
        from compress.passes.protocol.recipe import make_pass

        options: dict[str, Any] = {"scheme": embeddings, **({} if scales is None else {"scales": scales})}
        if engine is not None:
            from compress.jobs.target_engines import engine_named

            groups = engine_named(engine).table_groups
            options |= {} if groups is None else {"group_size": groups}
        added = (make_pass("embeddings", options),)
    if kv_cache is not None:
        from compress.passes.kv_cache import cache_pass

        added = (*added, cache_pass(kv_cache))
    return added
