"""Checkpoints of tiny models, written as trainers and converters write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from support.engine_host import Oracle
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], config: Path) -> Path:
    """A safetensors folder with a copy of this configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    if config != folder / "config.json":
        (folder / "config.json").write_text(config.read_text())
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """Words are single letters."""
    tokens = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(26)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(folder)


def write_checkpoint(folder: Path, oracle: Oracle) -> Path:
    """Beside the config.json that is there, with a tokenizer."""
    write_tokenizer(folder)
    tensors = {name: tensor.detach().clone() for name, tensor in oracle.model.named_parameters()}
    return write_tensors(folder, tensors, folder / "config.json")


def write_gguf(path: Path, model: LlamaForCausalLM) -> Path:
    """As converters do: names of their own, and the rotary halves of q and k interleaved."""
    import gguf  # here: machines that measure have none

    config, names = (
        model.config,
        gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers),
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [f"word{number}" for number in range(len(pieces), config.vocab_size)]
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * len(pieces))
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)])
    for name, tensor in model.named_parameters():
        value, heads = tensor.detach().numpy(), 0
        if ".q_proj" in name or ".k_proj" in name:
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            halves = value.reshape(heads, 2, -1, value.shape[1])
            value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        stem = names.get_name(name.removesuffix(".weight"))
        assert stem is not None, name
        writer.add_tensor(f"{stem}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
