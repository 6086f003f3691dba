"""Hardware and its prices: devices, links, operator and collective time, memory. Imports nothing of the layers above.

Start at ``Cluster`` (what there is) and ``CostModel`` (what things cost there under a mesh).
"""

from cost_models.cluster import Cluster
from cost_models.collectives import collective_seconds
from cost_models.cost_model import CostModel
from cost_models.efficiency import Curve, Efficiency, Tiling
from cost_models.hardware import Device, DeviceGroup, LinkException, LinkLevel, Protocol
from cost_models.memory import StateBytes, state_bytes

__all__ = [
    "Cluster",
    "CostModel",
    "Curve",
    "Device",
    "DeviceGroup",
    "Efficiency",
    "LinkException",
    "LinkLevel",
    "Protocol",
    "StateBytes",
    "Tiling",
    "collective_seconds",
    "state_bytes",
]
