"""Make CPU tensors answer as CUDA tensors do, for code that asks before it computes.

    with fake_cuda():
        assert torch.ones(2, device="cuda").is_cuda

Code for a GPU runs unchanged: only what it is told about its tensors is not true.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class FakeCuda(TorchFunctionMode):
    """Tell that tensors are on a GPU, but for those that were sent to the CPU by name.

    A tensor counts as one of the GPU unless it was asked for by the name ``cpu`` or comes from a
    tensor that was. A `torch.device` says nothing here, because both kinds of tensors really have
    the same one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        on_host = getattr(source, "fake_on_host", False)
        if func == torch.Tensor.is_cuda.__get__:
            return not on_host
        if func is torch.Tensor.type and len(args) == 1 and not on_host:
            return func(*args).replace("torch.", "torch.cuda.")
        if func in (torch.Tensor.pin_memory, torch.Tensor.record_stream):
            return source
        kwargs.pop("pin_memory", None)

        device = {torch.Tensor.cpu: "cpu", torch.Tensor.cuda: "cuda"}.get(func)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str):
            device, args = args[1], (source, "cpu", *args[2:])
        elif isinstance(kwargs.get("device"), str):
            device, kwargs["device"] = kwargs["device"], "cpu"
        result = source if func is torch.Tensor.cuda else func(*args, **kwargs)
        if device is not None:
            on_host = device == "cpu"
        if isinstance(result, torch.Tensor) and on_host != getattr(result, "fake_on_host", False):
            result = result.clone() if result is source else result
            result.fake_on_host = on_host
        return result


class NullStream(contextlib.nullcontext):
    """Stand in for a CUDA stream, for an event, and for the context of a stream."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> type["NullStream"]:
        return NullStream


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Run the body in a `FakeCuda`, with stand-ins for a few names of ``torch.cuda``; compile nothing."""
    stand_ins = {
        "Stream": NullStream,
        "stream": NullStream,
        "current_stream": NullStream,
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **stand_ins),
        torch.compiler.set_stance("force_eager"),
        FakeCuda(),
    ):
        yield
