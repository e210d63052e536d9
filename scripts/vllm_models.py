"""Writes the models that the vLLM tests run, as folders that vLLM loads: python scripts/vllm_models.py FOLDER

FOLDER/smollm2 is SmolLM2-135M-Instruct in float32 out of an installed package; FOLDER/tiny is a Llama of a few
layers with random weights; FOLDER/windows a Gemma 3, which has sliding windows in most of its layers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from kvcairn.demo.weights import prepare


def write_tiny(folder: Path) -> None:
    """A Llama whose logits lie far apart: a wrong byte in the KV changes the answer."""
    torch.manual_seed(20)
    settings = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    LlamaForCausalLM(settings).save_pretrained(folder)


def write_windows(folder: Path) -> None:
    """A Gemma 3 with two layers of full attention and four with a window of 100 tokens."""
    torch.manual_seed(21)
    settings = Gemma3TextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, initializer_range=0.2, sliding_window=100,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip
    Gemma3ForCausalLM(settings).save_pretrained(folder)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny(folder / "tiny")
    write_windows(folder / "windows")
    made = prepare(folder, lambda line: print(line, file=sys.stderr))
    link = folder / "smollm2"
    link.unlink(missing_ok=True)
    if made is not None:
        link.symlink_to(made.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
