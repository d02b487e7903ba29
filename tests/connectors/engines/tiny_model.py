"""A small model with random weights, and a tokenizer of bytes: nothing is downloaded.

A Llama, or with {"windows": N} a Gemma: every other layer looks back N tokens only.

Weights are scaled up: with those a configuration starts from, all tokens are nearly equally
likely, and a cache full of nonsense gives the same output.
"""

from __future__ import annotations

import json
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SCALE = 4.0
SPECIAL = ("<s>", "</s>", "<unk>")


def make(directory: str, **changes: object) -> int:
    """Write a model into a directory; return its parameters' number."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    seed = changes.pop("seed", 0)
    shape: dict[str, object] = {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
    }
    window = changes.pop("windows", 0)
    if window:
        kinds = ["sliding_attention", "full_attention"] * 2
        shape |= {"num_hidden_layers": 4, "sliding_window": window, "layer_types": kinds}
    config = (Gemma3TextConfig if window else LlamaConfig)(
        **{**shape, **changes},
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(int(str(seed)))
    model = (Gemma3ForCausalLM if window else LlamaForCausalLM)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SCALE)
    model.save_pretrained(directory, safe_serialization=True)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    print(make(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")))
