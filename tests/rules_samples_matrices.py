"""Samplers (see ``rules_samples``) of linear algebra: batches of matrices, each treated apart."""

from __future__ import annotations

import torch
from rules_samples import Arguments, Draw, sampler


def _square(draw: Draw) -> torch.Tensor:
    """Symmetric matrices whose eigenvalues are above one and apart."""
    root = draw.normal(*draw.shape(1, 2), 3, 3)
    return root @ root.mT + torch.diag(torch.tensor([1.0, 3.0, 6.0], dtype=torch.float64))


@sampler("linalg_cholesky", "det", "linalg_det", "logdet", "slogdet", "linalg_slogdet", "linalg_eigh",
         "linalg_eigvalsh", "linalg_eigvals", "linalg_eig", "linalg_lu_factor", "linalg_ldl_factor", "linalg_qr",
         "linalg_svdvals")  # fmt: skip
def square(draw: Draw) -> Arguments:
    return (_square(draw),), {}


@sampler("linalg_svd")
def singular_values(draw: Draw) -> Arguments:
    return (_square(draw)[..., :2], False), {}


@sampler("linalg_householder_product")
def householder_product(draw: Draw) -> Arguments:
    return tuple(torch.geqrf(_square(draw))), {}


@sampler("ormqr")
def ormqr(draw: Draw) -> Arguments:
    reflectors, scales = torch.geqrf(_square(draw))
    return (reflectors, scales, draw.normal(*scales.shape, 2)), {}


@sampler("lu_unpack")
def lu_unpack(draw: Draw) -> Arguments:
    return tuple(torch.linalg.lu_factor(_square(draw))), {}


@sampler("linalg_lu_solve")
def lu_solve(draw: Draw) -> Arguments:
    matrices, pivots = torch.linalg.lu_factor(_square(draw))
    return (matrices, pivots, draw.normal(*pivots.shape, 2)), {}


@sampler("linalg_solve")
def solve(draw: Draw) -> Arguments:
    matrices = _square(draw)
    return (matrices, draw.normal(*draw.broadcast(list(matrices.shape[:-2])), 3, 2)), {}


@sampler("cholesky_solve")
def cholesky_solve(draw: Draw) -> Arguments:
    matrices = _square(draw)
    return (draw.normal(*matrices.shape[:-1], 2), torch.linalg.cholesky(matrices)), {}


@sampler("linalg_solve_triangular")
def solve_triangular(draw: Draw) -> Arguments:
    matrices = _square(draw).tril()
    return (matrices, draw.normal(*matrices.shape[:-1], 2)), {"upper": False}
