"""A tensor made of other tensors, as quantized optimizer states are."""

from typing import Any

import torch


class Codes(torch.Tensor):
    """Codes into a table of values; like the real ones, it knows few operations and ``zero_`` is none."""

    codes: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, table: torch.Tensor) -> "Codes":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=table.dtype)

    def __init__(self, codes: torch.Tensor, table: torch.Tensor) -> None:
        self.codes, self.table = codes, table

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "table"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{cls.__name__} does not implement {function}")

    def __repr__(self) -> str:
        return f"Codes({self.codes}, {self.table})"
