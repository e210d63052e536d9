"""Converts the packaged weights, in a process of its own: it takes several times the memory that the model does.

python -m kvcairn.demo.convert GGUF TARGET
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers

_NOT_CONFIG = ("quantization_config", "_name_or_path", "transformers_version", "dtype", "torch_dtype")


def convert(gguf: Path, target: Path) -> None:
    """Write the model in `gguf` as float32 to the folder `target`, which appears when it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="converting-") as temporary:
        complete = Path(temporary) / target.name
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        read = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        settings = {k: v for k, v in read.config.to_dict().items() if k not in _NOT_CONFIG}
        # A fresh model of the same shape: the one that was read still believes itself quantised and cannot be saved.
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        model.save_pretrained(complete)
        tokenizer.save_pretrained(complete)
        try:
            complete.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, and its result is as good
                raise


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
