"""A small model in training on a CPU, under Megatron's optimizers or under torch's."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.overrides import TorchFunctionMode

from miles_reset.discovery import default_registry
from miles_reset.walk import Node, walk

TOKENS, WIDTH, BATCH = 32, 16, 64


class Net(nn.Module):
    """Map a token to a number."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(TOKENS, WIDTH)
            self.widen = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
            self.narrow = nn.Linear(2 * WIDTH, WIDTH, bias=False)
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, 1, bias=False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return one number a token."""
        embedded = self.embedding(tokens)
        hidden = embedded + self.narrow(torch.tanh(self.widen(embedded)))
        numbers: torch.Tensor = self.head(self.norm(hidden))
        return numbers.squeeze(-1)

    @property
    def matrices(self) -> list[torch.Tensor]:
        """The hidden matrices, those that Muon is for."""
        return [self.widen.weight, self.narrow.weight]


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens, and for each a noisy value of the number that belongs to it."""
    numbers = torch.randn(TOKENS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + i)
    tokens = torch.randint(TOKENS, (BATCH,), generator=generator)
    return tokens, numbers[tokens] + 0.3 * torch.randn(BATCH, generator=generator)


@dataclass
class Job:
    """A model and its optimizer, or optimizers.

    Attributes:
        net: The model.
        optimizer: What is handed to ``reset_optimizer_states``.
        ddp: Megatron's wrapper around the model, if any.
    """

    net: Net
    optimizer: Any
    ddp: Any = None

    def step(self, i: int) -> float:
        """Take one training step on the batch of that number; return its loss."""
        optimizers = self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
        if self.ddp is not None:
            self.ddp.zero_grad_buffer()
        for optimizer in optimizers:
            optimizer.zero_grad()
        tokens, numbers = batch(i)
        loss = nn.functional.mse_loss((self.ddp or self.net)(tokens).float(), numbers)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self.ddp is not None:
            self.ddp.finish_grad_sync()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    @property
    def leaves(self) -> list[Node]:
        """The optimizers that own state."""
        return walk(self.optimizer, default_registry()).leaves

    def weights(self) -> list[torch.Tensor]:
        """Return every tensor that holds weights: the model's, and the optimizers' master weights."""
        held = [*self.net.parameters(), *(p for leaf in self.leaves for p in parameters(leaf))]
        return list({id(weight): weight for weight in held}.values())

    @torch.no_grad()
    def take_over(self, other: Job, *, history: bool) -> Job:
        """Copy another job's weights into this new one, with what its optimizers remember or without."""
        for mine, theirs in zip(self.weights(), other.weights(), strict=True):
            mine.copy_(theirs)
        for leaf, old in zip(self.leaves, other.leaves, strict=True) if history else ():
            for mine, theirs in zip(parameters(leaf), parameters(old), strict=True):
                if theirs in old.obj.state:
                    leaf.obj.state[mine] = copy.deepcopy(old.obj.state[theirs])
        return self


Build = Callable[[], Job]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def parameters(leaf: Node) -> list[torch.Tensor]:
    """Return what a leaf optimizer steps."""
    return [parameter for group in leaf.obj.param_groups for parameter in group["params"]]


def torch_job() -> Job:
    """Build the job that needs nothing but torch: SGD for the hidden matrices, AdamW for the rest."""
    net = Net(torch.float32)
    matrices = set(net.matrices)
    rest = [parameter for parameter in net.parameters() if parameter not in matrices]
    return Job(net, [SGD(net.matrices, lr=0.05, momentum=0.9, dampening=0.9), AdamW(rest, lr=3e-3)])


def job_of(make: MakeOptimizer) -> Job:
    """Build a job with one optimizer for all."""
    net = Net(torch.float32)
    return Job(net, make(list(net.parameters())))


class _OnCpu(TorchFunctionMode):
    """Make on the CPU what is asked for on CUDA, and give CPU tensors the type names of CUDA's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs.get("device") == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def megatron_jobs() -> Iterator[Build]:
    """Run the body as the only rank of a Megatron job on the CPU, and undo all of it.

    Yields a function that builds the job: bfloat16 weights with float32 masters, muon for the hidden
    matrices, AdamW for the rest. Megatron itself is not changed; torch answers it as if on a GPU.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(_quiet())
        import emerging_optimizers  # noqa: F401  # Megatron's muon needs it; first, for it fails quickest
        from megatron.core import parallel_state

        with _mute():
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # left out of __all__
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            undo.callback(torch.distributed.destroy_process_group)
            undo.callback(parallel_state.destroy_model_parallel)
            parallel_state.initialize_model_parallel()
        for name, value in {"current_device": torch.device("cpu"), "current_stream": None}.items():
            undo.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(_OnCpu())
        yield _megatron_job


def _megatron_job() -> Job:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    net = Net(torch.bfloat16)
    for layer in (net.embedding, net.head):
        layer.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]  # Megatron's mark
    shape = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    ddp = DistributedDataParallel(shape, DistributedDataParallelConfig(grad_reduce_in_fp32=True), net)
    config = OptimizerConfig(optimizer="muon", lr=3e-3, bf16=True, clip_grad=0.0)
    return Job(net, get_megatron_optimizer(config, [ddp]), ddp)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what Megatron warns of, and what torch logs where there is a CUDA toolkit and no GPU."""
    log = logging.getLogger("torch.utils.cpp_extension")
    level = log.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)


@contextlib.contextmanager
def _mute() -> Iterator[None]:
    """Drop what other languages' code prints: some versions of gloo print a line for each process group."""
    with contextlib.ExitStack() as undo, Path(os.devnull).open("wb") as nowhere:
        for descriptor in (1, 2):
            saved = os.dup(descriptor)
            undo.callback(os.close, saved)
            undo.callback(os.dup2, saved, descriptor)
            os.dup2(nowhere.fileno(), descriptor)
        yield
