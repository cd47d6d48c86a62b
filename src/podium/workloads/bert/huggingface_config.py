"""The `config.json` of Hugging Face's `BertForPreTraining`, as keys of `workload.model`. Does not import torch."""

from collections.abc import Mapping
from typing import Any

from podium.errors import UserError
from podium.workloads.huggingface_config import FolderModel, activation_of, check_function, check_sizes, unknown_keys

#: key here -> the name there, and what counts where the file is silent
_SIZES: dict[str, tuple[str, Any]] = {
    "layers": ("num_hidden_layers", 12),
    "hidden": ("hidden_size", 768),
    "heads": ("num_attention_heads", 12),
    "inner": ("intermediate_size", 3072),
    "vocabulary": ("vocab_size", 30_522),
    "max_positions": ("max_position_embeddings", 512),
    "segments": ("type_vocab_size", 2),
    "norm_eps": ("layer_norm_eps", 1e-12),
}
_DROPOUTS = {"dropout": "hidden_dropout_prob", "attention_dropout": "attention_probs_dropout_prob"}
_ONLY = {"is_decoder": (False, None), "position_embedding_type": ("absolute", None)}


def model_of(config: Mapping[str, Any]) -> FolderModel:
    """Return what a folder's weights belong to; raise UserError where that is something else than this BERT."""
    if config.get("model_type") != "bert":
        raise UserError(f"config.json is of model type {config.get('model_type')!r}, expected 'bert'")
    check_function(config, _ONLY)
    check_sizes(config, (theirs for theirs, _ in _SIZES.values()))
    names = {key: theirs for key, (theirs, _) in _SIZES.items()}
    keys = {key: config.get(theirs, default) for key, (theirs, default) in _SIZES.items()}
    keys["activation"] = activation_of(config, "hidden_act", "gelu")
    keys["tied"] = config.get("tie_word_embeddings", True) is not False
    names |= {"activation": "hidden_act", "tied": "tie_word_embeddings", **_DROPOUTS}
    dropouts = {key: config.get(theirs, 0.1) for key, theirs in _DROPOUTS.items()}
    return FolderModel(keys, names, dropouts, unknown_keys(config, (*names.values(), *_ONLY)))
