"""The `config.json` of Hugging Face's `GPT2LMHeadModel`, as keys of `workload.model`. Does not import torch."""

from collections.abc import Mapping
from typing import Any

from podium.errors import UserError
from podium.workloads.huggingface_config import FolderModel, activation_of, check_function, check_sizes, unknown_keys

#: key here -> the names there, the usual one first, and what counts where the file is silent
_SIZES: dict[str, tuple[tuple[str, ...], Any]] = {
    "layers": (("n_layer", "num_hidden_layers"), 12),
    "hidden": (("n_embd", "hidden_size"), 768),
    "heads": (("n_head", "num_attention_heads"), 12),
    "context": (("n_positions", "max_position_embeddings"), 1024),
    "vocabulary": (("vocab_size",), 50_257),
    "norm_eps": (("layer_norm_epsilon",), 1e-5),
    "scale_attention": (("scale_attn_weights",), True),
    "scale_by_layer": (("scale_attn_by_inverse_layer_idx",), False),
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
#: changes the order of roundings, not what is computed; n_ctx repeats n_positions
_SAME = ("reorder_and_upcast_attn", "n_ctx", "is_decoder")


def model_of(config: Mapping[str, Any]) -> FolderModel:
    """Return what a folder's weights belong to; raise UserError where that is something else than this GPT-2."""
    if config.get("model_type") != "gpt2":
        raise UserError(f"these are the weights of a {config.get('model_type')} model, not of gpt2")
    check_function(config, {})
    check_sizes(config, ("n_inner", *(name for theirs, _ in _SIZES.values() for name in theirs)))
    names, keys = {}, {}
    for key, (theirs, default) in _SIZES.items():
        names[key] = next((name for name in theirs if name in config), theirs[0])
        keys[key] = config.get(names[key], default)
    inner = config.get("n_inner")
    keys["inner"] = 4 * keys["hidden"] if inner is None and isinstance(keys["hidden"], int) else inner
    keys["activation"] = activation_of(config, "activation_function", "gelu_new")
    keys["tied"] = config.get("tie_word_embeddings", True) is not False
    names |= {"inner": "n_inner", "activation": "activation_function", "tied": "tie_word_embeddings"}
    shares = {name: config.get(name, 0.1) for name in _DROPOUTS}
    one = all(share == shares[_DROPOUTS[0]] for share in shares.values())
    names["dropout"] = _DROPOUTS[0] if one else " / ".join(_DROPOUTS)
    dropout = shares[_DROPOUTS[0]] if one else " / ".join(map(str, shares.values()))
    known = (*(name for theirs, _ in _SIZES.values() for name in theirs), *names.values(), *_DROPOUTS, *_SAME)
    return FolderModel(keys, names, {"dropout": dropout}, unknown_keys(config, known))
