"""Names and sizes of the element types: the one place that says them. Names are torch's, without ``torch.``."""

from __future__ import annotations

#: Bytes of one element.
ITEM_SIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex32": 4, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip

#: Not a dtype but a rate: float32 matmuls on tensor cores, once torch's float32 matmul precision is below "highest".
TFLOAT32 = "tfloat32"

#: The dtype whose rate stands in where a device's table has none; "float32" for dtypes not listed.
RATE_STAND_IN = {
    "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16", "float8_e4m3fnuz": "bfloat16",
    "float8_e5m2fnuz": "bfloat16", "bfloat16": "float16", "complex128": "float64",
}  # fmt: skip


def item_size(dtype: str) -> int:
    """Bytes of one element of ``dtype``.

    Raises:
        ValueError: if the dtype is not known.
    """
    if dtype not in ITEM_SIZE:
        raise ValueError(f"unknown dtype {dtype!r}: expected one of {', '.join(ITEM_SIZE)}")
    return ITEM_SIZE[dtype]
