"""What a `config.json` of Hugging Face's libraries says about a transformer. Does not import torch.

Every key that changes what the model computes is taken over or refused. Those that change nothing (how text is sampled,
names of classes, versions) are passed over, and keys that nobody here has heard of are told.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from podium.errors import UserError
from podium.ui.console import say, warn

#: names of activations there -> here
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
#: of layers, widths, heads, positions and tokens
_LARGEST = 1 << 24
_EXPORTED = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
#: keys that change what any model computes, with the values that leave it as it is
_ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "tie_encoder_decoder": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}, []),
    "quantization_config": (None,),
    "auto_map": (None,),
}
#: keys that change nothing that a pretrained model computes
_PASSED_OVER = """
_attn_implementation _attn_implementation_autoset _name_or_path architectures attn_implementation bad_words_ids
begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout cls_token_id decoder_start_token_id
directionality diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
id2label initializer_range keys_to_ignore_at_inference label2id language length_penalty mask_token_id max_length
min_length model_max_length model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
num_return_sequences output_attentions output_hidden_states output_past output_scores pad_token_id pooler_fc_size
pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type prefix problem_type
remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
temperature tf_legacy_loss tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript
transformers_version typical_p unk_token_id use_bfloat16 use_cache
"""
_HARMLESS = frozenset(_PASSED_OVER.split())


class FolderModel(NamedTuple):
    """A `config.json`, read."""

    #: key of `workload.model` -> the value that the weights belong to
    keys: dict[str, Any]
    #: key of `workload.model` -> what the key is called there
    names: dict[str, str]
    #: key of `workload.model` -> share dropped when the weights were trained; another one leaves the model as it is
    dropouts: dict[str, Any]
    #: keys that are not known here
    unknown: tuple[str, ...]


def check_function(config: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UserError for a key whose value asks for something that the model here does not do."""
    for key, allowed in {**_ONLY, **only}.items():
        if config.get(key, allowed[0]) not in allowed:
            value, expected = (json.dumps(part, default=str)[:80] for part in (config[key], allowed[0]))
            raise UserError(f"config.json has {key} = {value}, which is not supported: expected {expected}")


def check_sizes(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise UserError for a size beyond any model; what else is wrong with it, the schema finds."""
    for name in names:
        size = config.get(name)
        if isinstance(size, int) and size > _LARGEST:
            shown = f"{size:,}" if len(str(size)) < 30 else f"a number of {len(str(size))} digits"
            raise UserError(f"config.json has {name} = {shown}, which is too large for a model")


def activation_of(config: Mapping[str, Any], key: str, default: str) -> str:
    """Return an activation by its name here."""
    name = config.get(key, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        shown = json.dumps(name, default=str)[:80]
        raise UserError(
            f"config.json has {key} = {shown}, which is not supported: expected one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def exported_activation(name: str) -> str:
    """Return what an activation is called there."""
    return _EXPORTED[name]


def unknown_keys(config: Mapping[str, Any], known: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of which nothing is known, sorted."""
    return tuple(sorted(config.keys() - set(known) - _HARMLESS - _ONLY.keys()))


def tell_what_differs(model: FolderModel, section: Mapping[str, Any], unused: Iterable[str]) -> None:
    """Tell what is not taken over from a folder: other dropouts, keys that nobody knows, tensors without a place."""
    told = [
        f"the weights to start from were trained with {model.names[key]} = {share}, this training has "
        f"workload.model.{key} = {section[key]}"
        for key, share in model.dropouts.items()
        if share != section[key]
    ]
    for sentence in told:
        say(sentence)
    if model.unknown:
        warn(f"config.json of the weights to start from has keys not known here: {_some(model.unknown)}")
    if names := sorted(unused):
        warn(f"tensors of the weights to start from that are not used: {_some(names)}")


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
