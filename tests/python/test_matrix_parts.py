"""Linear algebra of matrices with gaps in memory."""

import pytest
import torch

import kiln
from kiln.testing import assert_same


@pytest.mark.parametrize("name", ["inv", "cholesky", "solve", "lu_factor", "matrix_power"])
def test_matrices_that_are_parts_of_others(name):
    """Their results' layouts are found with stand-ins, which are regular whatever gaps they have."""

    def f(x):
        matrices = x[:, :3, :3]
        arguments = {"solve": (x[:, :3, 3],), "matrix_power": (-1,)}.get(name, ())
        return getattr(torch.linalg, name)(matrices, *arguments), getattr(torch.linalg, name)(
            matrices[:1].expand(2, 3, 3), *(a[:2] if isinstance(a, torch.Tensor) else a for a in arguments)
        )

    x = torch.eye(4).repeat(2, 1, 1) * 3 + torch.rand(2, 4, 4) * 0.1
    x = (x + x.mT).contiguous()
    assert_same(kiln.compile(f, fullgraph=True)(x), f(x), rtol=1e-4, atol=1e-5)
