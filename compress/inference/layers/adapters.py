"""Low-rank adapters for layers on codes: y = Q(x) + s B A x, where A and B train and the codes do not.

    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022. arXiv:2106.09685
    Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs. NeurIPS 2023. arXiv:2305.14314

peft makes, trains, saves and loads them. It knows torch's layers only; `lora` registers ours in its configuration.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from compress.base.errors import InputError
from compress.inference.layers.embedding import QuantEmbedding
from compress.inference.layers.fused import FusedLinear
from compress.inference.layers.linear import QuantLinear

if TYPE_CHECKING:
    from peft import LoraConfig

# Other initializations change the weight that they start from, or need it dense.
INITIALIZATIONS = (True, False, "gaussian")
DENSE = "load(dequantize=True) makes a dense model, which peft treats as any other"


def lora(config: "LoraConfig") -> "LoraConfig":
    """Returns the configuration, which now also attaches to layers on codes:

        model = get_peft_model(compress.load("OUT"), compress.lora(LoraConfig(target_modules=["q_proj", "v_proj"])))
        model.save_pretrained("ADAPTER")
        config = compress.lora(LoraConfig.from_pretrained("ADAPTER"))
        model = PeftModel.from_pretrained(compress.load("OUT"), "ADAPTER", config=config)

    An adapter can be merged into dense weights only: call `model.dequantize()` first. Raises InputError for options
    that need dense weights, and for another kind of configuration.
    """
    if type(config).__name__ != "LoraConfig":
        raise InputError(f"a {type(config).__name__} is no peft.LoraConfig; {DENSE}")
    if config.use_dora:
        raise InputError(f"use_dora splits a weight into length and direction, which codes cannot be; {DENSE}")
    if config.init_lora_weights not in INITIALIZATIONS:
        allowed = ", ".join(map(repr, INITIALIZATIONS))
        raise InputError(f"init_lora_weights={config.init_lora_weights!r}; allowed on codes: {allowed}; {DENSE}")
    if config.bias != "none":
        raise InputError(f"bias={config.bias!r}: the biases of layers on codes do not train; use 'none'; {DENSE}")
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        raise InputError(
            "target_modules='all-linear' finds torch.nn.Linear alone; name the layers, as in ['q_proj', 'v_proj']"
        )
    config._register_custom_module(_kinds())
    return config


@cache
def _kinds() -> dict[type[nn.Module], type[nn.Module]]:
    """{layer of ours: the class that peft puts around it}."""
    # Imported here, because peft is no dependency of ours.
    from peft.tuners.lora.layer import Embedding, Linear

    class CodesLinear(_OnCodes, Linear):  # type: ignore[misc]
        """An adapter for a QuantLinear or a part of a fused one."""

        def _get_in_out_features(self, module: nn.Module) -> tuple[Any, Any]:
            return module.in_features, module.out_features

    class CodesEmbedding(_OnCodes, Embedding):  # type: ignore[misc]
        """An adapter for a QuantEmbedding."""

    return {QuantLinear: CodesLinear, FusedLinear: CodesLinear, QuantEmbedding: CodesEmbedding}


class _OnCodes:
    """A mixin for adapters on codes: plain adapters only, merged only once the weight is dense."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """The plain variant only: peft refuses all others by this."""
        return {(): None}

    def merge(self, *arguments: Any, **named: Any) -> None:
        """Add the adapter to a dense weight. Raises InputError where the weight is still codes."""
        own: Any = self
        if isinstance(own.get_base_layer(), QuantLinear | FusedLinear | QuantEmbedding):
            raise InputError(
                "codes cannot take an adapter up; call model.dequantize() before merging, or begin with "
                "load(dequantize=True)"
            )
        super().merge(*arguments, **named)  # type: ignore[misc]
