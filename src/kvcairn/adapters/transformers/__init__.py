"""Hugging Face transformers: prefix reuse for any decoder-only model with a plain `DynamicCache`.

    with kv.Cache.open(config) as cache:
        model = CachedModel(hf_model, cache)
        out = model.generate(input_ids, max_new_tokens=32)

What is stored of one block, in this order without gaps: layer by layer, first K and then V of the layer, each as
`[token][head][dim]` in the model's own dtype, K as the model caches it (rotary positions applied). The position of a
token is its index in the sequence; padding is never stored.
"""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as missing:
    raise ImportError(
        f"the transformers adapter needs {missing.name}: in a clone: pip install '.[transformers]'", name=missing.name
    ) from missing

from kvcairn.adapters.transformers.model import CachedModel, Naming
from kvcairn.adapters.transformers.reuse import Reuse, RowReuse

__all__ = ["CachedModel", "Naming", "Reuse", "RowReuse"]
