"""Training steps of whole models before and after `replace_norms`: those of transformers, with random weights."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch

from cunorm.adapters.torch import host, replace_norms
from cunorm.bench.results import COMPILED, OURS, Measurement, first_line
from cunorm.bench.suites import STEPS, Row
from cunorm.bench.timing import Machine
from cunorm.bench.work import by_host_code

__all__ = ["PROVIDERS", "build", "measure", "step", "versions"]

PROVIDERS = ("torch", OURS, COMPILED)

Step = Callable[[], torch.Tensor]

_IMAGES = {"num_labels": 1000}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_LLAMA = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
_LLAMA |= {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": True}
_SMALL_IMAGES = {"num_labels": 10, "depths": [1, 1]}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
# Model -> its class in transformers, the class of its configuration, and the options that make it what it is called:
# those that are not the defaults. And those of the same model in small, which has every kind of layer.
_MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "ResNet-50": (
        "ResNetForImageClassification",
        "ResNetConfig",
        _IMAGES,
        _SMALL_IMAGES | {"embedding_size": 8, "hidden_sizes": [16, 32]},
    ),
    "Swin-B": (
        "SwinForImageClassification",
        "SwinConfig",
        _IMAGES | {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]},
        _SMALL_IMAGES | {"image_size": 32, "embed_dim": 16, "num_heads": [2, 4], "window_size": 4},
    ),
    "ConvNeXt-B": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _IMAGES | {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3]},
        _SMALL_IMAGES | {"num_stages": 2, "hidden_sizes": [8, 16]},
    ),
    "ViT-L": (
        "ViTForImageClassification",
        "ViTConfig",
        _IMAGES | _LARGE,
        _SMALL | {"image_size": 32, "num_labels": 10},
    ),
    "BERT-large": ("BertForMaskedLM", "BertConfig", _LARGE, _SMALL | {"vocab_size": 96}),
    "GPT-2 medium": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 1024, "n_layer": 24, "n_head": 16},
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "Llama-like 1B": (
        "LlamaForCausalLM",
        "LlamaConfig",
        _LLAMA,
        _SMALL | {"vocab_size": 96, "num_key_value_heads": 1},
    ),
}
# A step is queued while the one before runs, as in training; so some are timed together.
_STEPS, _ROUNDS = 3, 9
# How far the first losses may lie apart: those of models whose dropout draws other numbers too, once they are compiled.
_LARGEST_DIFFERENCE = 0.05


def versions() -> dict[str, str]:
    """The version of the library that has the models, if it is installed."""
    try:
        return {"transformers": metadata.version("transformers")}
    except metadata.PackageNotFoundError:
        return {}


def build(name: str, small: bool) -> torch.nn.Module:
    """A model with random weights, always the same ones, in float32 on the CPU and in training."""
    import transformers

    model_class, config_class, options, cut = _MODELS[name]
    config = getattr(transformers, config_class)(**cut if small else options)
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, model_class)(config)
    return model.train()


def step(model: torch.nn.Module, shape: Sequence[int], forward: Callable[..., Any] | None = None) -> Step:
    """A training step on random data of this shape, images or tokens; it returns the loss.

    ``forward`` is the model compiled, say.
    """
    parameter = next(model.parameters())
    device, generator = parameter.device, torch.Generator().manual_seed(1)
    config: Any = model.config
    if len(shape) == 4:
        images = torch.randn(tuple(shape), generator=generator)
        labels = torch.randint(config.num_labels, (shape[0],), generator=generator)
        batch = {"pixel_values": images.to(device, parameter.dtype), "labels": labels.to(device)}
    else:
        tokens = torch.randint(2, config.vocab_size, tuple(shape), generator=generator).to(device)
        batch = {"input_ids": tokens, "labels": tokens}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call = model if forward is None else forward

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = call(**batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return run


def measure(row: Row, provider_names: Sequence[str], machine: Machine, warm: bool) -> list[Measurement]:
    """The median time of a training step of a model: ``torch`` is the model as it is, ``cunorm`` after `replace_norms`.

    All begin with the same weights and see the same data; their steps take turns. Calls of PyTorch tensors are made by
    Python, and again by compiled code where that was built and the model is not compiled itself.
    """
    host_code = {OURS: None, COMPILED: host.native}
    has_compiled = host.native is not None and row.direction == STEPS[0]
    names = [name for name in PROVIDERS if name in provider_names and (name != COMPILED or has_compiled)]
    notes: dict[str, str] = {}
    steps: dict[str, Step] = {}
    losses: dict[str, float] = {}
    torch.compiler.reset()  # PyTorch gives up compiling what many models have in common
    for name in names:
        try:
            model = build(row.op, row.suite.endswith("small")).to(machine.device, getattr(torch, row.dtype))
            if name in host_code:
                replace_norms(model)
            run = step(model, row.shape, torch.compile(model) if row.direction == "compiled step" else None)
            if name in host_code:
                run = by_host_code("torch", host_code[name], run)
            torch.manual_seed(2)
            losses[name] = float(run())
            steps[name] = run
        except Exception as error:  # no such library, no memory, or the compiler's
            notes[name] = first_line(error)
    expected = losses.pop("torch", None)
    differences = {} if expected is None else {name: abs(loss / expected - 1) for name, loss in losses.items()}
    for name, difference in differences.items():
        if not difference <= _LARGEST_DIFFERENCE:
            notes[name] = f"wrong: the loss is {losses[name]:.4g}, and without cunorm {expected:.4g}"
            del steps[name]
    if warm:
        notes = dict.fromkeys(names, "not timed") | notes
        steps = {}
    seconds = dict(zip(steps, _seconds(list(steps.values()), machine)))
    return [
        dataclasses.replace(
            Measurement.of(row, name, copy_seconds=None),
            seconds=seconds.get(name),
            error=differences.get(name),
            note=notes.get(name, ""),
        )
        for name in names
    ]


def _seconds(steps: Sequence[Step], machine: Machine) -> list[float]:
    """The median time of a step of each, by the host's clock, the device waited for; the first round is not counted."""
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(1 + _ROUNDS):
        for run, times in zip(steps, samples):
            _wait(machine)
            begin = time.perf_counter()
            for _ in range(_STEPS):
                run()
            _wait(machine)
            times.append((time.perf_counter() - begin) / _STEPS)
    return [statistics.median(times[1:]) for times in samples]


def _wait(machine: Machine) -> None:
    if machine.device == "cuda":
        torch.cuda.synchronize()
