"""Finds the figures of the machine that a live ``DeviceMesh`` runs on.

A preset's ``[match]`` table says which GPUs it describes: ``device_name`` is a part of the driver's name for it, and
the memory must be that of the preset to within ``MEMORY_TOLERANCE`` (A100s come with 40 and with 80 GB).
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from cost_models.dtypes import TFLOAT32
from cost_models.presets import load_efficiency, load_preset, preset_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Relative tolerance: reported memory varies a little between driver versions.
MEMORY_TOLERANCE = 0.03

#: Bytes of the device's memory that a CUDA context takes.
CONTEXT_BYTES = 0.6e9

#: By compute capability: float32 units, and half-precision tensor core multiply-adds per clock, of one
#: multiprocessor (CUDA C++ programming guide, arithmetic throughput; architecture white papers). 0: no tensor cores.
MULTIPROCESSOR = {
    (6, 0): (64, 0), (6, 1): (128, 0), (7, 0): (64, 512), (7, 5): (64, 512), (8, 0): (64, 1024), (8, 6): (128, 512),
    (8, 9): (128, 512), (9, 0): (128, 2048), (10, 0): (128, 4096), (10, 3): (128, 4096), (12, 0): (128, 512),
}  # fmt: skip


def describe(mesh: DeviceMesh) -> dict[str, Any]:
    """The cluster under ``mesh``, in the format of ``cost_models.cluster_format``.

    Raises:
        ValueError: if nothing is known of the device type or GPU.
    """
    return describe_devices(mesh.device_type, mesh.size())


def describe_devices(device_type: str, num_devices: int) -> dict[str, Any]:
    """The same of so many devices as this process has one of.

    ``float32`` is as fast as this process multiplies it: with ``torch.set_float32_matmul_precision("high")`` as TF32.

    Raises:
        ValueError: as ``describe``.
    """
    if device_type == "cpu":
        return _on_hosts(load_preset("cpu-local"), num_devices, num_devices)
    if device_type != "cuda":
        raise ValueError(
            f"no figures for device type {device_type!r}: expected a mesh of 'cpu' or 'cuda', or name the cluster"
            " (a preset or a .toml file)"
        )
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    preset = match_preset(properties.name, properties.total_memory)
    data = load_preset(preset) if preset else estimate(properties)
    rates = data["device"]["flops"]
    if TFLOAT32 in rates and torch.backends.cuda.matmul.fp32_precision == "tf32":
        rates["float32"] = rates[TFLOAT32]
    if "host" in data:
        data["host"] = {**data["host"], "memory_bytes": min(data["host"]["memory_bytes"], memory_of_host())}
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count())
    return _on_hosts(data, num_devices, per_host)


def memory_of_host() -> float:
    """Bytes that this machine has beside its devices, which may be a part of what the preset's has."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def match_preset(device_name: str, memory_bytes: float) -> str | None:
    """The preset of which ``[match]`` fits the GPU, or None."""
    for name in preset_names():
        data = load_preset(name)
        expected = data.get("match", {}).get("device_name")
        if expected is None or expected.lower() not in device_name.lower() or " nvl" in device_name.lower():
            continue  # the NVL cards bear the name of the SXM ones, on other links
        if math.isclose(data["device"]["memory_bytes"], memory_bytes, rel_tol=MEMORY_TOLERANCE):
            return name
    return None


def estimate(properties: Any) -> dict[str, Any]:
    """A single-host cluster of a GPU without preset, from torch's properties of it; links as of PCI Express cards.

    Raises:
        ValueError: if its compute capability is not known.
    """
    capability = (properties.major, properties.minor)
    if capability not in MULTIPROCESSOR:
        raise ValueError(
            f"no figures for GPU {properties.name!r}: known are the presets {', '.join(preset_names())}; name the one"
            " that is closest, or write a .toml file (see cost_models/cluster_format.py)"
        )
    units, tensor_units = MULTIPROCESSOR[capability]
    clock = properties.multi_processor_count * properties.clock_rate * 1e3  # the driver gives kHz
    memory_clock = properties.memory_clock_rate * 1e3
    half = 2 * clock * max(tensor_units, units)
    flops = {"float32": 2 * clock * units, "float16": half, "bfloat16": half}
    if capability >= (8, 0):
        flops["tfloat32"] = half / 2
    base = load_preset("8x1080ti")
    efficiency = load_efficiency("geforce" if tensor_units else "pascal")
    efficiency["matmul"]["tiles"]["processors"] = properties.multi_processor_count
    device = {
        "name": properties.name,
        "flops": flops,
        "memory_bytes": properties.total_memory,
        "memory_bandwidth": memory_clock * 2 * properties.memory_bus_width / 8,  # double data rate, bits to bytes
        "launch_overhead": base["device"]["launch_overhead"],
        "reserved_bytes": CONTEXT_BYTES,
        "efficiency": efficiency,
    }
    return {"name": f"estimated {properties.name}", "device": device, "levels": base["levels"]}


def _on_hosts(data: dict[str, Any], num_devices: int, per_host: int) -> dict[str, Any]:
    """``data`` with its levels resized: ``num_devices`` in all, on hosts of at most ``per_host``."""
    inner = math.gcd(num_devices, min(num_devices, per_host))
    sizes = [inner, num_devices // inner] if len(data["levels"]) > 1 else [num_devices]
    levels = [{**level, "size": size} for level, size in zip(data["levels"], sizes, strict=True)]
    name = ":".join((data["name"], "x".join(str(size) for size in reversed(sizes))))
    return {**data, "name": name, "levels": levels}
