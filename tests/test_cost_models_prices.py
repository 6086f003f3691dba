"""Prices of collectives on every preset, held to figures that a model of levels without a graph once gave.

Presets whose protocols were fitted to measured collectives since then (A100, H100, H200, B200) have their figures.
"""

from __future__ import annotations

import math

import pytest

from cost_models import Cluster, CostModel
from cost_models.collectives import ALGORITHMS

#: (devices outside, size, devices inside) of the axis that is priced: within a node, between nodes, over both.
MESHES = ((1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 4, 8), (1, 32, 1), (4, 2, 4), (2, 16, 1))
#: Sum of the logarithms of all prices, by collective in the order of ``ALGORITHMS``.
FIGURES = {
    "8x-rtx3090": (-150.517350106316, -159.220613311730, -159.220613311730, -183.280498070256, -162.746175890748),
    "8x-rtx4090": (-150.517350106316, -159.220613311730, -159.220613311730, -183.280498070256, -162.746175890748),
    "8x1080ti": (-133.987455994350, -144.371887182223, -144.371887182223, -166.950432941031, -145.063846087463),
    "a100-pcie-80g": (-159.751511310835, -168.204150389324, -168.204150389324, -195.978008272384, -172.871620481701),
    "a10g": (-149.486645497366, -158.372404904683, -158.372404904683, -182.281735264784, -161.652405069626),
    "aws-p3dn": (-166.043983446101, -174.467456085692, -174.467456085692, -194.365481254715, -177.319004587051),
    "aws-p4d": (-171.480728482640, -179.976382305404, -181.222440834130, -196.641157379755, -183.579013510769),
    "aws-p5": (-186.841418052298, -195.029642325461, -195.155964395191, -211.428565557830, -195.261622891616),
    "cpu-local": (-87.103151917138, -94.711712865407, -94.711712865407, -110.590620084710, -91.433934074693),
    "dgx-a100-40g": (-178.123091901569, -186.027845922125, -187.322748769031, -203.009443314707, -189.996742631101),
    "dgx-a100-80g": (-178.123091901569, -186.027845922125, -187.322748769031, -203.009443314707, -189.996742631101),
    "dgx-b200": (-186.130222832761, -195.053554821503, -195.184493696664, -209.639429132518, -199.633541540804),
    "dgx-h100": (-187.608839357838, -195.718486465625, -195.851363684012, -212.079024617439, -196.240679450202),
    "dgx-h200": (-187.274122126449, -195.095061892246, -196.119438105859, -212.265547727430, -196.240679450202),
    "dgx-v100-16g": (-174.013336523627, -181.346396530047, -181.346396530047, -202.294535117936, -181.233868243322),
    "dgx-v100-32g": (-174.013336523627, -181.346396530047, -181.346396530047, -202.294535117936, -181.233868243322),
    "h100-96g-500w": (-187.608839357838, -195.718486465625, -195.851363684012, -212.079024617439, -196.240679450202),
    "l4": (-149.486645497366, -158.372404904683, -158.372404904683, -182.281735264784, -161.652405069626),
    "t4": (-143.298559893771, -152.447811755704, -152.447811755704, -177.574111776297, -155.139777303011),
    "tpu-v4": (-203.631297086371, -212.941829753374, -212.941829753374, -235.457383207355, -208.797719922853),
}


@pytest.mark.parametrize("name", FIGURES)
def test_prices_on_presets_are_what_they_were(name: str) -> None:
    per_node = Cluster.parse(name).num_devices
    for collective, figure in zip(ALGORITHMS, FIGURES[name], strict=True):
        logarithms = []
        for outer, size, inner in MESHES:
            cluster = Cluster.parse(f"{name}:{max(1, outer * size * inner // per_node)}")
            model = CostModel(cluster, {"outer": outer, "axis": size, "inner": inner})
            logarithms += [
                math.log(model.collective_seconds(collective, num_bytes=num_bytes, axis="axis"))
                for num_bytes in (1e3, 1e6, 1e9)
            ]
        assert math.fsum(logarithms) == pytest.approx(figure, rel=0, abs=2e-12)
