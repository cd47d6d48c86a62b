"""Matrix products inside kernels: by the kernel `products` where it is in use and pays, else by torch.

left (m, k), right (k, n), bias (n,), out (m, n)
"""

import torch
from torch import Tensor

from podium.kernels import registry


def pays(m: int, k: int, n: int) -> bool:
    """Return whether a product of (m, k) and (k, n) is not left to torch."""
    faster = registry.find("products")
    return faster is not None and faster.is_large(m, k, n)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left · right, plus a bias."""
    faster = registry.find("products")
    if faster is not None and faster.is_large(len(left), *right.shape):
        result: Tensor = faster.multiplied(left, right, bias, None)
        return result
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def product_into(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
    """Set `out` to the same; with `bias` being `out`, add the product to it."""
    faster = registry.find("products")
    if faster is not None and faster.is_large(len(left), *right.shape) and out.stride(1) == 1:
        faster.multiplied(left, right, bias, out)
    elif bias is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(bias, left, right, out=out)
