"""Error messages about recipes: where the value came from, the key, the value, what was expected.

WHERE: KEY = VALUE: expected …
WHERE: unknown key KEY (did you mean …?)
"""

import difflib
import json
from collections.abc import Iterable, Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from podium.recipe.section import Section, all_keys

#: name in other systems -> keys here, of which the first that exists in the recipe's workload is suggested; names with
#: a dot take precedence
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    name: keys
    for names, keys in (
        ("batch.size batch_size micro_batch micro_batch_size per_device_train_batch_size", ("batch.micro",)),
        ("global_batch global_batch_size train_batch_size", ("batch.global",)),
        ("gradient_accumulation gradient_accumulation_steps accumulation_steps", ("batch.accumulation",)),
        ("accumulate_grad_batches grad_accum grad_accum_steps", ("batch.accumulation",)),
        ("num_replicas world_size data_parallel data_parallel_size", ("batch.replicas",)),
        ("epochs num_epochs max_epochs num_train_epochs steps num_steps max_steps train_steps", ("train.length",)),
        ("updates iterations max_iters num_updates", ("train.length",)),
        ("early_stopping early_stopping_patience", ("train.stop",)),
        ("monitor metric_for_best_model", ("checkpoint.best.metric",)),
        ("pretrained pretrained_weights init_checkpoint finetune_from", ("workload.init_from",)),
        ("frozen freeze_layers", ("optim.freeze",)),
        ("param_groups parameter_groups", ("optim.groups",)),
        ("learning_rate base_lr max_lr peak_lr", ("optim.lr",)),
        ("optimizer optimiser optim.type optim.kind", ("optim.name",)),
        ("wd l2", ("optim.weight_decay",)),
        ("beta1 beta2", ("optim.betas",)),
        ("epsilon", ("optim.eps",)),
        ("clip grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip_val", ("optim.clip_norm",)),
        ("scheduler lr_scheduler lr_schedule schedule.type schedule.kind", ("schedule.name",)),
        ("warmup_steps warmup_updates warmup_epochs warmup_iters warmup_ratio num_warmup_steps", ("schedule.warmup",)),
        ("milestones", ("schedule.at",)),
        ("gamma", ("schedule.factor",)),
        ("amp fp16 bf16 mixed_precision", ("precision.mode",)),
        ("ema swa", ("average.method",)),
        ("ema_decay", ("average.decay",)),
        ("num_stages pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size", ("parallel.stages",)),
        ("gradient_checkpointing activation_checkpointing checkpoint_activations", ("parallel.recompute",)),
        ("fsdp zero zero_stage", ("parallel.shard",)),
        ("num_threads", ("engine.threads",)),
        ("eval_every eval_interval eval_steps val_interval val_check_interval", ("valid.every",)),
        ("eval_batch_size per_device_eval_batch_size", ("valid.micro",)),
        ("save_every save_interval save_steps checkpoint_interval", ("checkpoint.every",)),
        ("save_total_limit max_to_keep", ("checkpoint.keep",)),
        ("data_path data_dir dataset_path", ("workload.data.path",)),
        ("num_layers n_layer n_layers depth", ("workload.model.layers",)),
        ("hidden_size n_embd d_model", ("workload.model.hidden",)),
        ("num_heads n_head n_heads num_attention_heads", ("workload.model.heads",)),
        ("vocab_size", ("workload.model.vocabulary",)),
        ("workload.data.augment.turn", ("workload.data.augment.group",)),
        (
            "block_size seq_len seq_length sequence_length max_seq_len",
            ("workload.model.context", "workload.data.length"),
        ),
    )
    for name in names.split()
}

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_pattern_mismatch": "your own code such as mine.py:Name",
    "dict_type": "a section with keys of its own",
    "model_type": "a section with keys of its own",
    "model_attributes_type": "a section with keys of its own",
}


def explain(error: ValidationError, schema: type[Section], origins: Mapping[str, str], where: str) -> str:
    """Return one sentence about the first mistake, followed by the others.

    `origins` maps each dotted key to the file (or the command line) that set it, in the order in which they were set.
    """
    keys = list(all_keys(schema))
    # A value that matches no branch of `X | Y` produces one error per branch, and a list one per value.
    by_key: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors():
        by_key.setdefault(_dotted(detail, keys), []).append(detail)
    sentences = [_sentence(dotted, details, keys, origins, where) for dotted, details in by_key.items()]
    more = f" (and {len(sentences) - 1} more: {'; '.join(sentences[1:4])})" if len(sentences) > 1 else ""
    return sentences[0] + more


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return a hint at the most similar known name, to be appended to a sentence; empty if none is similar."""
    near = difflib.get_close_matches(str(given), list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def nearest_key(dotted: str, keys: list[str]) -> str | None:
    """Return the key that was most likely meant: by another system's name, from another section, or a similar one."""
    section, _, leaf = dotted.rpartition(".")
    keys = [key for key in keys if key != dotted]
    for name in (dotted, leaf):
        for key in _ELSEWHERE.get(name, ()):
            if key in keys:
                return key
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    if same_leaf:
        # The given key may be the end of it (`model.dropout`); otherwise the section is similar (`val.every`).
        ending = [key for key in same_leaf if key.endswith(f".{dotted}")]
        return max(ending or same_leaf, key=lambda key: difflib.SequenceMatcher(None, key, dotted).ratio())
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    near = difflib.get_close_matches(leaf, siblings, 1, cutoff=0.5)
    if near:
        return siblings[near[0]]
    whole = difflib.get_close_matches(dotted, keys, 1, cutoff=0.6)
    return whole[0] if whole else None


def _dotted(detail: ErrorDetails, keys: list[str]) -> str:
    """Return the location as a dotted key, without list indices and names of union branches."""
    parts: list[str] = []
    for part in detail["loc"]:
        grown = ".".join([*parts, str(part)])
        if detail["type"] == "extra_forbidden" or any(key == grown or key.startswith(f"{grown}.") for key in keys):
            parts.append(str(part))
    return ".".join(parts)


def _sentence(dotted: str, details: list[ErrorDetails], keys: list[str], origins: Mapping[str, str], where: str) -> str:
    first = details[0]
    is_section = not dotted or any(key.startswith(f"{dotted}.") for key in keys)
    # A contradiction between keys of a section is attributed to whoever set the last of them.
    written = [origins[key] for key in origins if key == dotted or key.startswith(f"{dotted}.")]
    origin = written[-1] if written else where
    if first["type"] == "extra_forbidden":
        value = first["input"]
        while isinstance(value, dict) and len(value) == 1:  # as the command line writes it: `optimizer.lr=0.1`
            (leaf, value), *_ = value.items()
            dotted += f".{leaf}"
        near = nearest_key(dotted, keys)
        shown = dotted if all(part.strip() for part in dotted.split(".")) else json.dumps(dotted)  # empty names
        return f"{origin}: unknown key {shown}" + (f" (did you mean {near}?)" if near else "")
    if first["type"] == "missing" and not isinstance(first["loc"][-1], int):
        return f"{origin}: {dotted} is required and missing"
    if first["type"] == "value_error" and is_section and isinstance(first["input"], dict):
        # Checks across the keys of a section name the keys themselves.
        return f"{origin}: {first['ctx']['error']}"
    value = json.dumps(first["input"], default=str)
    shown = f"{dotted} = {value}" if len(value) <= 80 else dotted
    return f"{origin}: {shown}: {_problem(details)}"


def _problem(details: list[ErrorDetails]) -> str:
    """Return what is wrong with one value, combining all branches of its type."""
    for detail in details:
        if detail["type"] == "value_error":
            return str(detail["ctx"]["error"])
    expected = list(dict.fromkeys(_expected(detail) for detail in details))
    hints = [did_you_mean(detail["input"], _choices(detail)) for detail in details if detail["type"] == "literal_error"]
    return f"expected {' or '.join(expected)}{next(filter(None, hints), '')}"


def _choices(detail: ErrorDetails) -> list[str]:
    text: str = detail["ctx"]["expected"]
    return text.replace("'", "").replace(" or ", ", ").split(", ")


def _expected(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind == "literal_error":
        choices = _choices(detail)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if kind in ("too_long", "too_short"):
        limit = "max_length" if kind == "too_long" else "min_length"
        return f"at {'most' if kind == 'too_long' else 'least'} {detail['ctx'][limit]} values"
    if kind == "missing":  # of a list with a fixed number of values
        return "more values"
    message = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return _EXPECTED.get(kind, f"a number {message}" if message.startswith(("greater", "less")) else message)
