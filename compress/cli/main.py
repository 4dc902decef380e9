"""The command line: arguments -> API calls, and what a person reads. Nothing else is decided here."""

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import compress
from compress.cli.terminal import console, visible
from compress.errors import CompressError, InputError, first_line, one_of
from compress.reading import LOOP, special

if TYPE_CHECKING:
    from compress.passes.base import Pass

STOPPED = 130  # what a shell reports for a command that was interrupted
TRACEBACK = "COMPRESS_TRACEBACK"


def exits_cleanly(command: Callable[..., None]) -> Callable[..., None]:
    """One line on standard error and exit code 2 for bad input, 1 for work that failed; never a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except InputError as error:
            fail(str(error), 2)
        except CompressError as error:
            fail(said(error), 1)
        except out_of_memory() as error:
            fail(f"out of memory ({first_line(error)}); use a smaller --batch-size or --device cpu", 1)
        except OSError as error:
            fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
        except KeyboardInterrupt as error:
            fail(said(error), STOPPED)
        except click.ClickException:
            raise
        except Exception as error:  # a defect of ours or of a library: one line, the traceback on request
            if os.environ.get(TRACEBACK):
                raise
            fail(f"unexpected {type(error).__name__}: {error} (set {TRACEBACK}=1 to see where)", 1)

    return wrapped


def out_of_memory() -> tuple[type[Exception], ...]:
    """What torch raises where a device is full; nothing where torch has not been imported, so cannot have raised."""
    found = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return () if found is None else (found,)


def said(error: BaseException) -> str:
    """What an exception says, and what was added to it on its way."""
    return "; ".join([str(error) or "stopped", *getattr(error, "__notes__", ())])


def fail(message: str, code: int) -> None:
    """Say why in one line and leave."""
    click.echo(f"compress: {visible(' '.join(message.split()))}", err=True)
    leave(code)


def leave(code: int) -> None:
    """End the process. Under torchrun without the interpreter's own end, in which torch's communication threads
    sometimes abort a rank whose work is done ("terminate called without an active exception")."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)


def begin() -> None:
    """How every command with a model begins its work, after what it can refuse without the libraries, whose import
    takes seconds: the risk that is taken is said, and what libraries say between our lines is not."""
    chosen = click.get_current_context().params
    if chosen.get("trust_remote_code") and not chosen.get("quiet") and os.environ.get("RANK", "0") == "0":
        click.echo("warning: Python code that comes with the model is run, with all your rights", err=True)
    warnings.filterwarnings("ignore")
    import huggingface_hub
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()  # it announces every retry


def given(name: str) -> bool:
    """Whether a person wrote this option of the running command, rather than leaving its default."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def write_report(target: str | None, value: Any) -> None:
    """JSON to a file, or to standard output for `-`."""
    if target is None:
        return
    text = json.dumps(value, indent=2, default=str) + "\n"
    if target == "-":
        click.echo(text, nl=False)
    else:
        try:
            Path(target).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {target}: {error.strerror}") from None


def _writable(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a file that cannot be written before the work whose figures it is to hold."""
    if value is None or value == "-":
        return value
    path = Path(value)
    if path.is_dir() or special(path) == LOOP:
        raise click.BadParameter(f"{value!r} is {special(path)}; give a file, or '-' for standard output")
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{value!r} cannot be written; give a file in a directory that exists, or '-'")
    return value


quiet_option = click.option("--quiet", is_flag=True, help="No progress, no table; errors only.")
trust_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code that comes with the model. Read it first: it can do whatever you can.",
)
json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    callback=_writable,
    help="Write the figures as JSON ('-': standard output).",
)
device_option = click.option(
    "--device", metavar="DEVICE", help="cpu, cuda, cuda:1 ... [default: a GPU if there is one]"
)


class Commands(click.Group):
    """Errors of usage quote arguments, which may be the names of files: they are shown as text, too."""

    def make_context(self, *words: Any, **options: Any) -> click.Context:
        with _quoting():
            return super().make_context(*words, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _quoting():
            return super().invoke(ctx)


@contextmanager
def _quoting() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        raise click.UsageError(visible(error.format_message()), error.ctx) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(compress.__version__, prog_name="compress")
def cli() -> None:
    """Make a trained model smaller, and say honestly what it cost.

    \b
    compress demo                                              see it work on the built-in model
    compress quantize MODEL --method gptq --calibration TEXT --output OUT
    compress evaluate OUT --reference MODEL --text TEXT
    compress inspect OUT
    compress generate OUT --prompt "Once upon a time"
    compress bench

    MODEL is a local Hugging Face directory, a hub id, or `demo`. TEXT is a .txt, .jsonl (field `text`) or .parquet
    file, a `datasets` id, a .pt or .npy file of token ids [samples, length], or `demo`.
    """


@cli.command(short_help="Quantize a model and write a checkpoint.")
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
@click.option("--calibration", metavar="TEXT", help="What the model is shown. Needed by every method but rtn.")
@click.option("--samples", type=int, help="Windows of calibration text.  [default: 128; every row of a token file]")
@click.option("--length", type=int, help="Tokens per window of text.  [default: the model's context, at most 2048]")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Samples per forward pass.")
@click.option(
    "--ignore", multiple=True, metavar="PATTERN", help="Layers to leave alone, like '*.down_proj'. Repeatable."
)
@click.option("--output", required=True, metavar="OUT", help="The directory to write. It appears when it is complete.")
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
    from compress.recipe import load_recipe, make_pass, regrouped

    check_processes(fsdp, options["device"])
    chosen = {key: options.pop(key) for key in ("scheme", "group_size", "grid", "activations", "calibrator")}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r}; write NAME=VALUE")
        name = name.replace("-", "_")
        if name in chosen:
            raise InputError(f"option {name} is given twice ({chosen[name]!r} and {value!r}); give it once")
        chosen[name] = value
    notes = []
    if recipe is None:
        passes: tuple[Pass, ...] = (make_pass(method, chosen),)
    else:
        size = chosen.pop("group_size") if given("group_size") else None
        if chosen or any(map(given, ("method", "embeddings", "kv_cache"))):
            dropped = [name for name in ("method", "embeddings", "kv_cache") if given(name)] + [*chosen]
            raise InputError(f"--recipe says everything about its passes but --group-size; drop {', '.join(dropped)}")
        passes = load_recipe(recipe)
        if size is not None:
            passes, changed = regrouped(passes, size)
            notes.append(f"--group-size {size} instead of what recipe {recipe!r} gives {', '.join(changed)}")
    if embeddings is not None:
        passes = (*passes, make_pass("embeddings", {"scheme": embeddings}))
    if kv_cache is not None:
        from compress.passes.kv_cache import cache_pass

        passes = (*passes, cache_pass(kv_cache))
    calibration = options.pop("calibration")
    if calibration is None and not any(p.calibrated for p in passes):
        unused = [f"--{o.replace('_', '-')}" for o in ("samples", "length", "batch_size") if given(o)]
        if unused:
            who = f"recipe {recipe!r}" if recipe is not None else f"method {method!r}"
            raise InputError(f"{who} uses no calibration data; drop {', '.join(unused)}")
    begin()
    with process_group(fsdp, options["device"]) as rank, reporting("quantize", quiet or rank > 0) as reporter:
        for note in notes:
            reporter.note(note)
        result = compress.quantize(
            model,
            passes,
            calibration=calibration,
            output=output,
            fsdp=fsdp,
            reporter=reporter,
            ignore=options.pop("ignore"),
            **options,
        )
    if rank == 0:
        assert result.output is not None
        write_report(json_file, json.loads((result.output / "compress.json").read_text(encoding="utf-8")))
        if not quiet and json_file != "-":
            from compress.cli import tables as show

            show.result(result, model, output)
    if fsdp:
        leave(0)


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


@cli.command(short_help="Measure perplexity, KL divergence to the original, and size.")
@click.argument("model")
@click.option("--reference", metavar="MODEL", help="The original, to compare with: KL divergence, same-top share.")
@click.option("--text", required=True, metavar="TEXT", help="Held-out text, or token ids (evaluated row by row).")
@click.option("--length", type=int, help="Tokens per window of text.  [default: the model's context, at most 2048]")
@click.option("--samples", type=int, help="At most so many windows, spread over the text.")
@trust_option
@device_option
@json_option
@quiet_option
@exits_cleanly
def evaluate(model: str, reference: str | None, text: str, json_file: str | None, quiet: bool, **options: Any) -> None:
    """Measure perplexity, KL divergence to the original, and true size.

    Non-overlapping windows; every token after a window's first is predicted. KL is KL(original || MODEL) in nats per
    token. Bytes are those of the weight files. Behind ± is the standard error over windows (--json: over tokens, too).
    """
    begin()
    from compress.cli.progress import reporting
    from compress.device import find_device
    from compress.evaluation.report import recipe_of, report

    recipe = recipe_of(model) if json_file is not None else None
    with reporting("evaluate", quiet) as reporter:
        found = compress.evaluate(
            model,
            reference=reference,
            text=text,
            reporter=reporter,
            **options,
        )
    if json_file is not None:
        write_report(json_file, report(model, reference, recipe, found, find_device(options["device"])))
    if not quiet and json_file != "-":
        from compress.cli import tables as show

        show.evaluations([(model, found)], reference)


@cli.command(short_help="Show every layer: scheme, bits, bytes, why it was left alone.")
@click.argument("model")
@click.option("--kernels", is_flag=True, help="Which kernel each compressed layer gets, and why not a faster one.")
@click.option("--calibration", is_flag=True, help="The ranges that calibration fixed, and what they clip.")
@click.option(
    "--html",
    metavar="FILE",
    callback=_writable,
    help="With --calibration: write its table and histograms as one page (needs the report extra).",
)
@trust_option
@device_option
@json_option
@quiet_option
@exits_cleanly
def inspect(
    model: str,
    kernels: bool,
    calibration: bool,
    html: str | None,
    trust_remote_code: bool,
    device: str | None,
    json_file: str | None,
    quiet: bool,
) -> None:
    """Show every layer of a checkpoint: shape, scheme, bits, bytes, and what was left alone and why."""
    if kernels and calibration:
        raise InputError("--kernels and --calibration are two reports; ask for one")
    if html is not None and not calibration:
        raise InputError("--html is for --calibration, which has histograms to draw; drop it or add that")
    if device is not None and not kernels:
        raise InputError("--device is for --kernels: without it nothing depends on a device")
    if trust_remote_code and not kernels:
        raise InputError("--trust-remote-code is for --kernels: without it nothing of the model is run")
    if html is not None:
        from compress.evaluation.page import check_plotly

        if html == "-":
            raise InputError("--html '-'; give a file")
        check_plotly()
    begin()
    from compress.cli import tables as show

    silent = quiet or json_file == "-"
    if kernels:
        from compress.device import find_device
        from compress.evaluation.routes import kernel_rows

        target = find_device(device)
        found = kernel_rows(model, target, trust_remote_code=trust_remote_code)
        write_report(json_file, {"device": str(target), "layers": [asdict(row) for row in found]})
        if not silent:
            show.kernels(found, str(target))
        return
    if calibration:
        from compress.evaluation.calibration import calibrated_ranges, content, write_ranges

        ranges = calibrated_ranges(model)
        write_report(json_file, {"model": model, "ranges": content(ranges)})
        if html is not None:
            write_ranges(model, ranges, Path(html))
        if not silent:
            show.calibration(ranges)
        return
    from compress.evaluation.size import inspect_checkpoint

    rows, size = inspect_checkpoint(model)
    write_report(json_file, {"layers": [asdict(row) for row in rows], "size": asdict(size)})
    if not silent:
        show.inspection(rows, size)


@cli.command(short_help="Continue a prompt with a model, compressed or not.")
@click.argument("model")
@click.option("--prompt", required=True, help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="New tokens at most.")
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0: always the likeliest token."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampling.")
@click.option("--dequantize", is_flag=True, help="Compute with dense weights instead of compressed ones.")
@click.option(
    "--int8-activations", is_flag=True, help="Also round what the layers multiply: faster on a CPU, less exact."
)
@trust_option
@device_option
@exits_cleanly
def generate(
    model: str,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    dequantize: bool,
    int8_activations: bool,
    trust_remote_code: bool,
    device: str | None,
) -> None:
    """Continue a prompt with a model; a compressed one runs compressed."""
    begin()
    import torch

    from compress.checkpoint.pretrained import load_tokenizer
    from compress.checkpoint.source import find_source
    from compress.device import find_device

    target = find_device(device)
    source = find_source(model, trust_remote_code)
    tokenizer = load_tokenizer(source)
    notes: list[str] = []
    network: Any = compress.load(
        model,
        torch.float32 if target.type == "cpu" else None,
        target,
        dequantize=dequantize,
        int8_activations=int8_activations,
        trust_remote_code=trust_remote_code,
        notes=notes,
    )
    for note in notes:
        click.echo(f"compress: {visible(note)}", err=True)
    if not hasattr(network, "generate"):
        raise InputError(f"{type(network).__name__} does not generate text")
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(target)
    if inputs["input_ids"].shape[1] == 0:
        raise InputError("the prompt is empty; give at least one token")
    context = getattr(network.config, "max_position_embeddings", None)
    if context is not None and inputs["input_ids"].shape[1] + tokens > context:
        raise InputError(
            f"the prompt has {inputs['input_ids'].shape[1]} tokens and {tokens} more are asked for; the model holds "
            f"{context}: ask for fewer --tokens or shorten the prompt"
        )
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    output = network.generate(**inputs, max_new_tokens=tokens, pad_token_id=tokenizer.eos_token_id, **sampling)
    click.echo(tokenizer.decode(output[0], skip_special_tokens=True))


@cli.command(short_help="Check that a checkpoint holds what its run decided.")
@click.argument("model")
@trust_option
@json_option
@quiet_option
@exits_cleanly
def verify(model: str, trust_remote_code: bool, json_file: str | None, quiet: bool) -> None:
    """Check that a written checkpoint holds what its run decided and loads in transformers as exactly that."""
    begin()
    found = compress.verify(model, trust_remote_code)
    write_report(json_file, found)
    if not quiet and json_file != "-":
        click.echo(visible(f"{found['layers']} layers bit for bit; transformers {found['transformers']}"))


@cli.command(short_help="List the methods, or show the card of one.")
@click.argument("name", required=False)
@exits_cleanly
def methods(name: str | None) -> None:
    """List the methods, or show the card of one: what it does, its source, and an option a line."""
    from compress.cli.cards import card_of, summary_of
    from compress.recipe import PASSES

    if name is None:
        for key in PASSES:
            click.echo(f"{key:12} {summary_of(key)}")
        return
    click.echo(str(card_of(one_of("method", name, PASSES))))


@cli.command(short_help="List the built-in recipes, or print one.")
@click.argument("name", required=False)
@exits_cleanly
def recipes(name: str | None) -> None:
    """List the built-in recipes, or print one: YAML to use by its name (--recipe NAME), or to copy and change."""
    from compress.recipe import BUILT_IN, about

    texts = {key: path.read_text(encoding="utf-8") for key, path in BUILT_IN.items()}
    if name is not None:
        click.echo(texts[one_of("recipe", name, texts)], nl=False)
        return
    for key, text in texts.items():
        click.echo(f"{key:16} {about(text)}")


@cli.command(short_help="Measure speed on this machine: of the kernels, or of a model.")
@click.argument("model", required=False)
@click.option("--shapes", metavar="NxK,...", help="Outputs x inputs of the linear layers.  [default: Llama's on a GPU]")
@click.option("--tokens", metavar="M,...", help="Tokens that are multiplied at once.")
@click.option("--schemes", metavar="NAME,...", help="What a shape is measured as.  [default: dense,w4a16,w8a8]")
@click.option("--batch", metavar="B,...", help="Sequences that are generated at once.  [default: 1,16; CPU: 1,4]")
@click.option("--prompt", type=int, help="Tokens of a prompt.  [default: 2048; CPU: 128]")
@click.option("--new", type=int, help="Tokens that follow it.  [default: 128; CPU: 16]")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the arithmetic: bfloat16, float16, float32.")
@click.option("--rounds", type=int, help="How often everything is timed.  [default: 50; of a MODEL: 10]")
@click.option("--quick", is_flag=True, help="Less of everything.")
@click.option("--tune", is_flag=True, help="First find the fastest kernel configurations for these products (GPU).")
@click.option("--html", metavar="FILE", callback=_writable, help="Write plots as one page (needs the report extra).")
@trust_option
@device_option
@json_option
@quiet_option
@exits_cleanly
def bench(model: str | None, json_file: str | None, html: str | None, quiet: bool, **options: Any) -> None:
    """Measure speed on this machine.

    \b
    compress bench                    the linear layers: every kernel against dense and other libraries
    compress bench llama-3-8b         a random model of a known shape: prefill and decode, dense and compressed
    compress bench OUT                a compressed checkpoint against its dequantized self

    Shapes: tiny, small, llama-3-8b, llama-3-70b. What a kernel or a model computes is checked before it is timed.
    Times are held against the bandwidth and the products that this machine reaches at best, measured in the same run.
    """
    of_linears, of_models = ("shapes", "tokens", "tune"), ("schemes", "batch", "prompt", "new", "trust_remote_code")
    foreign = [
        f"--{name.replace('_', '-')}" for name in (of_linears if model is not None else of_models) if given(name)
    ]
    if foreign:
        where = "the linear layers, without a MODEL" if model is not None else "a MODEL, and none is given"
        raise InputError(f"{', '.join(foreign)}: only for {where}; drop it")
    if html == "-":
        raise InputError("--html '-'; give a file")
    begin()
    from compress.cli.progress import reporting
    from compress.evaluation.speed.run import run_bench
    from compress.evaluation.speed.table import tables

    chosen = {
        name: value for name, value in options.items() if name not in (of_models if model is None else of_linears)
    }
    target = None if json_file in (None, "-") else Path(str(json_file))
    page = None if html is None else Path(html)
    with reporting("bench", quiet) as reporter:
        report = run_bench(model, target, page, reporter, **chosen)
    if json_file == "-":
        write_report("-", report.content())
    elif not quiet:
        for part in tables(report):
            console().print(part, highlight=False)
    if report.failures:
        more = f" ({len(report.failures)} in all)" if len(report.failures) > 1 else ""
        raise CompressError(f"wrong or failed, and not timed: {report.failures[0]}{more}")


@cli.command(short_help="Compare plain rounding and GPTQ on the built-in model.")
@click.option("--scheme", default="w3a16", show_default=True, help="w2a16 ... w8a16.")
@click.option("--group-size", type=int, default=128, show_default=True)
@click.option("--output", metavar="DIR", help="Keep the two checkpoints here.  [default: a temporary directory]")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoints of an earlier demo in --output.")
@quiet_option
@exits_cleanly
def demo(scheme: str, group_size: int, output: str | None, overwrite: bool, quiet: bool) -> None:
    """Quantize the built-in model by plain rounding and by GPTQ, and compare both with the original."""
    import tempfile

    from compress.cli.progress import reporting

    if overwrite and output is None:
        raise InputError("--overwrite needs --output; without it the demo keeps nothing")
    begin()
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        for made in (
            compress.RTN(scheme=scheme, group_size=group_size),
            compress.GPTQ(scheme=scheme, group_size=group_size),
        ):
            target = Path(output or scratch) / f"demo-{scheme}-{made.name}"
            with reporting(f"{made.name} quantize", quiet) as reporter:
                compress.quantize(
                    "demo",
                    made,
                    calibration="demo" if made.calibrated else None,
                    output=target,
                    overwrite=overwrite,
                    reporter=reporter,
                )
            with reporting(f"{made.name} evaluate", quiet) as reporter:
                found = compress.evaluate(target, reference="demo", text="demo", reporter=reporter)
            rows.append((f"{made.name.upper()} {scheme} g{group_size}", found))
    if not quiet:
        from compress.cli import tables as show

        show.evaluations(rows, "fp16 (original)")


def main() -> None:
    """Entry point of `compress` and `python -m compress`."""
    cli()
