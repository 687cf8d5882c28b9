"""Models, optimizers and dtypes by name, for the command line.

A model is a `config.json` of Hugging Face transformers; it is built from that alone, on the meta
device, so no weights are read or downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch

from ..base.errors import PlanError

OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "adafactor": "Adafactor",
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Heads that take labels, so that the loss is part of the step.
_HEADS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM")


def optimizer_of(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of torch.optim with this name (in lower case)."""
    kind = getattr(torch.optim, OPTIMIZERS.get(name, ""), None)
    if kind is None:
        raise PlanError(f"got optimizer {name!r}, expected one of {', '.join(OPTIMIZERS)}.")
    cls: type[torch.optim.Optimizer] = kind
    return cls


def language_model(path: str) -> Callable[..., tuple[torch.nn.Module, Any]]:
    """Return a function that builds a configuration's language model and a sample with labels.

    It takes a batch size and a sequence length. Raises PlanError if the file is not such a
    configuration, or if transformers is not installed.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise PlanError(
            f"{path} has no model_type, so it is not the configuration of a Hugging Face model. A "
            "graph is planned with `sn memory plan`."
        )
    if util.find_spec("transformers") is None:
        raise PlanError(
            f"{path} is a configuration of transformers, which is not installed: pip install "
            "transformers"
        )
    library = import_module("transformers")
    settings = {key: value for key, value in data.items() if key != "model_type"}
    try:
        config = library.AutoConfig.for_model(data["model_type"], **settings)
    except ValueError as error:
        raise PlanError(f"{path}: {str(error).splitlines()[0]}") from error
    # The cache is for generation; in training it would only keep keys and values of all layers.
    config.use_cache = False
    named = str(next(iter(data.get("architectures") or ()), ""))
    # For a model of images and text, the text part.
    words = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(words, "vocab_size", None) is None:
        raise PlanError(
            f"{path} is a {data['model_type']}, which takes no token ids; pass a function that "
            "returns (model, sample) instead."
        )

    def make(batch: int = 1, sequence: int = 1024) -> tuple[torch.nn.Module, Any]:
        most = getattr(words, "max_position_embeddings", None)
        if most is not None and sequence > most:
            raise PlanError(f"{path} has {most} positions; got a sequence of {sequence}.")
        with torch.device("meta"):
            if named.endswith(_HEADS) and hasattr(library, named):
                model = getattr(library, named)(config)
            else:
                model = library.AutoModelForCausalLM.from_config(config)
            tokens = torch.empty(batch, sequence, dtype=torch.long)
        return model.train(), {"input_ids": tokens, "labels": tokens}

    return make
