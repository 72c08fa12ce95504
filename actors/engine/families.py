"""The model families that this engine serves, as data, and what in a configuration it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torpor.actors.engine.errors import ModelRefused

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the others rewrite their tables as texts grow
DIVIDED = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)  # over the ranks, in all families


@dataclass(frozen=True, slots=True)
class Family:
    """model_type and architecture are transformers' names.

    undivided: what its tensor-parallel plan leaves whole on every rank, so that more ranks would save nothing or
    compute wrongly; "" where the plan holds.
    gguf: whether its GGUF files are read, too.
    experts: fields of a configuration that count experts, where the family can have some.
    divided: fields that ranks divide beside those of all families.
    """

    model_type: str
    architecture: str
    undivided: str = ""
    gguf: bool = False
    experts: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()


FAMILIES = (
    Family("llama", "LlamaForCausalLM", gguf=True),
    Family("qwen3", "Qwen3ForCausalLM"),
    Family("mistral", "MistralForCausalLM"),
    Family("gemma3_text", "Gemma3ForCausalLM"),
    Family(
        "gpt_oss", "GptOssForCausalLM", undivided="attention and its sinks", experts=("num_local_experts",)
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        undivided="attention and states",
        experts=("num_local_experts",),
    ),
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",  # its gated delta layers and their states stay whole on every rank
        experts=("num_experts",),
        divided=("moe_intermediate_size", "shared_expert_intermediate_size"),
    ),
    Family("lfm2", "Lfm2ForCausalLM", undivided="attention and convolution states"),
)


def check_config(config: Any, tensor_parallel: int, gguf: bool = False) -> Family:
    """Refuse by name what this engine does not serve. config is a transformers config. Raises ModelRefused.

    gguf: the weights come from such a file.
    """
    name = architecture(config)
    family = next((one for one in FAMILIES if one.architecture == name), None)
    if family is None:
        served = ", ".join(one.architecture for one in FAMILIES)
        raise ModelRefused(f"architecture {name} is not served by this engine; served: {served}")
    if family.model_type != config.model_type:
        raise ModelRefused(
            f"architecture {name} of model type {config.model_type!r} is not served, only {family.model_type!r}"
        )
    if gguf and not family.gguf:
        read = ", ".join(one.architecture for one in FAMILIES if one.gguf)
        raise ModelRefused(
            f"GGUF files of {name} are not read, only those of {read}; give its folder of safetensors"
        )
    quantized = getattr(config, "quantization_config", None)
    if quantized and not gguf:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise ModelRefused(
            f"weights quantized by {method!r} are not read; give the model's bfloat16, float16 or float32 weights"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if rope_type not in STATIC_ROPE_TYPES:
            raise ModelRefused(
                f"rope type {rope_type!r} is not served: its tables change with the text; "
                f"served: {', '.join(STATIC_ROPE_TYPES)}"
            )
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelRefused(f"{name} with use_bidirectional_attention generates no text; it is not served")
    if tensor_parallel > 1:
        _check_ranks(family, config, tensor_parallel)
    return family


def architecture(config: Any) -> str:
    """The one that it names; GGUF files and some dummies name only the model type."""
    named = getattr(config, "architectures", None)
    if named:
        return str(named[0])
    model_type = getattr(config, "model_type", "unknown")
    family = next((one for one in FAMILIES if one.model_type == model_type), None)
    return family.architecture if family is not None else f"of model type {model_type!r}"


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """Of all layers; some families have parameters for each type of layer."""
    nested = [one for one in parameters.values() if isinstance(one, dict)]
    return {str(one.get("rope_type", "default")) for one in (nested or [parameters])}


def _check_ranks(family: Family, config: Any, tensor_parallel: int) -> None:
    if family.undivided:
        raise ModelRefused(
            f"{family.architecture} cannot be served by tensor_parallel {tensor_parallel}: transformers' plan leaves "
            f"{family.undivided} whole on every rank; use tensor_parallel 1"
        )
    for field in (*DIVIDED, *family.divided):
        value = int(getattr(config, field))
        if value % tensor_parallel:
            raise ModelRefused(
                f"{family.architecture} has {field} {value}, which tensor_parallel {tensor_parallel} does not divide; "
                f"choose a divisor of {value}"
            )
