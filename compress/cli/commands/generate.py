"""`compress generate`: a prompt and what a model makes of it."""

from collections.abc import Sequence
from typing import Any

import click

import compress
from compress.base.errors import InputError
from compress.base.terminal import say
from compress.checkpoint.read.tokenizer_check import tokenizing
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import reading_options
from compress.cli.options import begin, write_report


@click.command(short_help="Continue a prompt with a model, compressed or not.")
@click.argument("model")
@click.option("--prompt", required=True, help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Most new tokens.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Temperature of sampling; 0: the likeliest token.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of sampling.")
@click.option("--dequantize", is_flag=True, help="Compute with dense weights instead of compressed ones.")
@click.option(
    "--int8-activations", is_flag=True, help="Also round inputs of layers to int8: faster on a CPU, less exact."
)
@click.option(
    "--compile", "compiled", is_flag=True, help="Compile decoding first, for minutes: for blocks not run in one call."
)
@reading_options
@exits_cleanly
def generate(
    model: str,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    compiled: bool,
    trust_remote_code: bool,
    device: str | None,
    json_file: str | None,
    quiet: bool,
    **how: Any,
) -> None:
    """Continue a prompt. A compressed model runs on its stored codes."""
    begin()
    import torch

    from compress.base.device import find_device
    from compress.checkpoint.read.configuration import check_generation
    from compress.checkpoint.read.pretrained import load_tokenizer
    from compress.checkpoint.read.source import find_source
    from compress.inference.steps.block import remarks

    target = find_device(device)
    source = find_source(model, trust_remote_code)
    tokenizer = load_tokenizer(source)
    notes: list[str] = []
    dtype = torch.float32 if target.type == "cpu" else None
    network: Any = compress.load(model, dtype, target, trust_remote_code=trust_remote_code, notes=notes, **how)
    tell(notes, quiet)
    if not hasattr(network, "generate"):
        raise InputError(f"{type(network).__name__} does not generate text")
    check_generation(network.generation_config.to_diff_dict(), source.path / "generation_config.json")
    if compiled:
        compress.compile_steps(network)
    inputs = tokenize(tokenizer, prompt, network, tokens).to(target)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    output = network.generate(**inputs, max_new_tokens=tokens, pad_token_id=tokenizer.eos_token_id, **sampling)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    count = inputs["input_ids"].shape[1]
    if output.shape[1] - count > 1 and not compiled:  # the first token is no step
        tell(on_steps := remarks(network), quiet)
        notes += on_steps
    counts = {"prompt_tokens": count, "new_tokens": output.shape[1] - count}
    write_report(json_file, {"model": model, "prompt": prompt, "text": text, **counts, "notes": notes})
    if not quiet and json_file != "-":
        click.echo(text)


def tell(notes: Sequence[str], quiet: bool) -> None:
    """Print notes on standard error."""
    for note in notes if not quiet else ():
        say(f"compress: {note}", stderr=True)


def tokenize(tokenizer: Any, prompt: str, model: Any, more: int) -> Any:
    """The prompt as a model's inputs. Refuses an empty one, and one after which `more` tokens do not fit."""
    with tokenizing(tokenizer, "the prompt", [prompt]):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    count = inputs["input_ids"].shape[1]
    if count == 0:
        raise InputError("the prompt is empty; give at least one token")
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and count + more > context:
        raise InputError(
            f"the prompt has {count} tokens and {more} more are asked for; the model holds {context}: ask for fewer "
            "--tokens or shorten the prompt"
        )
    return inputs
