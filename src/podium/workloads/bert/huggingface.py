"""Conversion of weights to and from Hugging Face's `BertForPreTraining`.

The fused layer of queries, keys and values here is three layers there; every other tensor has its counterpart.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from podium.errors import UserError
from podium.workloads.bert.model import Bert

_EMBEDDINGS, _HEAD = "bert.embeddings", "cls.predictions"
_QKV = ("query", "key", "value")
#: tensors that a file may omit because they equal another
_TIED_TO = {
    f"{_HEAD}.decoder.weight": f"{_EMBEDDINGS}.word_embeddings.weight",
    f"{_HEAD}.decoder.bias": f"{_HEAD}.bias",
}
#: names of layer norm parameters in the oldest files
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def names(model: Bert) -> dict[str, tuple[str, ...]]:
    """Map each parameter's name here to its names there; more than one if it is made of several."""
    pairs = {
        "embedding.word.weight": f"{_EMBEDDINGS}.word_embeddings.weight",
        "embedding.position.weight": f"{_EMBEDDINGS}.position_embeddings.weight",
        "embedding.segment.weight": f"{_EMBEDDINGS}.token_type_embeddings.weight",
        "classifier.bias": f"{_HEAD}.bias",
    }
    if not model.section.tied:
        pairs |= {f"classifier.{kind}": f"{_HEAD}.decoder.{kind}" for kind in ("weight", "bias")}
    layers = {
        "embedding.norm": f"{_EMBEDDINGS}.LayerNorm",
        "pooler.dense": "bert.pooler.dense",
        "classifier.dense": f"{_HEAD}.transform.dense",
        "classifier.norm": f"{_HEAD}.transform.LayerNorm",
        "classifier.next": "cls.seq_relationship",
    }
    found: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in pairs.items()}
    for number in range(len(model.encoders)):
        ours, theirs = f"encoders.{number}", f"bert.encoder.layer.{number}"
        layers |= {
            f"{ours}.attention.out": f"{theirs}.attention.output.dense",
            f"{ours}.attention_norm": f"{theirs}.attention.output.LayerNorm",
            f"{ours}.feed_forward.wide": f"{theirs}.intermediate.dense",
            f"{ours}.feed_forward.out": f"{theirs}.output.dense",
            f"{ours}.norm": f"{theirs}.output.LayerNorm",
        }
        for kind in ("weight", "bias"):
            found[f"{ours}.attention.qkv.{kind}"] = tuple(f"{theirs}.attention.self.{part}.{kind}" for part in _QKV)
    for ours, theirs in layers.items():
        found |= {f"{ours}.{kind}": (f"{theirs}.{kind}",) for kind in ("weight", "bias")}
    return found


def config_of(model: Bert) -> dict[str, Any]:
    """Return the content of `config.json` for the model."""
    section = model.section
    layers, hidden, heads = section.shape
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "vocab_size": model.vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": section.num_inner,
        "hidden_act": "gelu",
        "hidden_dropout_prob": section.dropout,
        "attention_probs_dropout_prob": section.attention_dropout,
        "max_position_embeddings": section.max_positions,
        "type_vocab_size": section.segments,
        "initializer_range": section.init_std,
        "layer_norm_eps": section.norm_eps,
        "pad_token_id": 0,
        "tie_word_embeddings": section.tied,
    }


def to_huggingface(model: Bert) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (the content of config.json, the tensors by their names there)."""
    params = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for ours, theirs in names(model).items():
        parts = params[ours].detach().chunk(len(theirs))
        tensors |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    tensors.setdefault(f"{_HEAD}.bias", params["classifier.bias"].detach().clone())  # not tied: exists there, unused
    return config_of(model), tensors


#: key of config.json -> key of the recipe that must agree
_MUST_AGREE = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "intermediate_size": "inner",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "max_positions",
    "type_vocab_size": "segments",
    "layer_norm_eps": "norm_eps",
}


def from_huggingface(model: Bert, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Copy the weights of a `BertForPreTraining`; if they do not fit, raise UserError and change nothing."""
    if config.get("model_type") != "bert":
        raise UserError(f"config.json is of model type {config.get('model_type')!r}, expected 'bert'")
    ours = config_of(model)
    for theirs, key in _MUST_AGREE.items():
        if theirs in config and config[theirs] != ours[theirs]:
            raise UserError(
                f"config.json has {theirs} = {config[theirs]}, but the model of the recipe has {ours[theirs]}: "
                f"set workload.model.{key}={config[theirs]}"
            )
    if config.get("hidden_act", "gelu") != "gelu":
        raise UserError(f"config.json has hidden_act = {config['hidden_act']}, but only gelu is supported")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UserError("config.json asks for relative positions, but only absolute ones are supported")
    params = dict(model.named_parameters())
    found = {name: torch.cat([_tensor(tensors, part) for part in parts]) for name, parts in names(model).items()}
    for name, tensor in found.items():
        if tensor.shape != params[name].shape:
            raise UserError(
                f"{names(model)[name][0]} is {list(tensor.shape)}, but the model of the recipe has "
                f"{list(params[name].shape)} there"
            )
    with torch.no_grad():
        for name, tensor in found.items():
            params[name].copy_(tensor)


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    old = next((name.replace(new, old) for new, old in _OLD_NAMES.items() if new in name), name)
    for candidate in (name, old):
        if candidate in tensors:
            return tensors[candidate]
    if name in _TIED_TO:
        return _tensor(tensors, _TIED_TO[name])
    raise UserError(f"the file has no tensor {name}: expected the weights of a BertForPreTraining")
