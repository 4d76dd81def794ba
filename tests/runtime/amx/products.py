"""A process: products of torch and vLLM by AMX beside products without AMX. The figures go to standard output."""

from __future__ import annotations

import ctypes
import json

import torch

SHAPES = [(1, 64, 32), (7, 256, 96), (16, 64, 16), (33, 320, 48), (65, 132, 80)]  # rows, depth, columns


def bf16_error(rows: int, depth: int, columns: int) -> float:
    left = torch.randn(rows, depth, dtype=torch.bfloat16)
    right = torch.randn(depth, columns, dtype=torch.bfloat16)
    exact = left.double() @ right.double()
    return float((((left @ right).double() - exact).abs() / exact.abs().clamp(min=depth**0.5)).max())


def int8_error(rows: int, depth: int, columns: int) -> int:
    left = torch.randint(-128, 128, (rows, depth), dtype=torch.int8)
    right = torch.randint(-128, 128, (depth, columns), dtype=torch.int8)
    return int((torch._int_mm(left, right).long() - left.long() @ right.long()).abs().max())


def vllm_error(rows: int, depth: int, columns: int) -> float:
    """Relative error of vLLM's product of int8 weights, its activations rounded to 8 bits."""
    import vllm._C  # type: ignore[import-not-found]  # noqa: F401

    activations = torch.randn(rows, depth, dtype=torch.bfloat16)
    weights = torch.randint(-128, 128, (columns, depth), dtype=torch.int8)
    scales = torch.rand(columns)
    packed = torch.ops._C.convert_weight_packed(weights)
    made = torch.ops._C.int8_scaled_mm_with_quant(activations, packed, scales, None, torch.bfloat16, True)
    exact = activations.double() @ (weights.double() * scales.double()[:, None]).T
    return float((made.double() - exact).abs().max() / exact.abs().max())


def main() -> None:
    computed = ctypes.CDLL(None).amx_computed
    computed.restype = ctypes.c_uint64
    torch.manual_seed(0)
    told: dict[str, object] = {"amx": torch.cpu._is_amx_tile_supported()}
    for name, error, shapes in (
        ("bf16", bf16_error, SHAPES),
        ("int8", int8_error, SHAPES),
        ("vllm", vllm_error, [(7, 256, 96), (33, 320, 64)]),
    ):
        before = computed()
        told[name] = max(error(*shape) for shape in shapes)
        told[f"{name} by AMX"] = computed() - before
    print(json.dumps(told))


if __name__ == "__main__":
    main()
